"""Tables of the service. `migrations/` creates them; a test compares both.

Times are seconds since 1970, which the wire wants and every database sorts alike.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, Float, ForeignKey, Index, Integer, MetaData, String, Text, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

_NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_name)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "pk": "pk_%(table_name)s",
}


_INCIDENT = "level <> 'info'"


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=_NAMES)
    type_annotation_map = {dict[str, Any]: JSON, list[str]: JSON, float: Float, str: String(255)}  # noqa: RUF012


class Key(Base):
    """An API key; only its hash is kept."""

    __tablename__ = "keys"

    id: Mapped[str] = mapped_column(primary_key=True)
    user: Mapped[str] = mapped_column(index=True)
    hash: Mapped[str] = mapped_column(String(64), unique=True)
    scopes: Mapped[list[str]]
    created_at: Mapped[float]
    expires_at: Mapped[float | None]
    revoked_at: Mapped[float | None]


class PageSession(Base):
    """A browser that signed in with a key; only the hash of its cookie is kept."""

    __tablename__ = "page_sessions"

    hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    key_id: Mapped[str] = mapped_column(ForeignKey("keys.id", ondelete="CASCADE"))
    created_at: Mapped[float]
    expires_at: Mapped[float]


class File(Base):
    """An uploaded or produced file; its content lies in `files/<id>` of the data folder."""

    __tablename__ = "files"

    id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    purpose: Mapped[str]
    filename: Mapped[str] = mapped_column(Text)
    bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64))
    rows: Mapped[int | None]
    """Rows of training data; None for other files."""
    format: Mapped[str | None]
    created_at: Mapped[float] = mapped_column(index=True)
    expires_at: Mapped[float | None]

    __table_args__ = (Index("ix_files_page", "owner", "created_at", "id"),)


class Job(Base):
    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    state: Mapped[str] = mapped_column(String(16), index=True)
    """Changed by `store.jobs.move` alone."""
    model: Mapped[str] = mapped_column(Text)
    training_file: Mapped[str]
    validation_file: Mapped[str | None]
    suffix: Mapped[str | None]
    seed: Mapped[int] = mapped_column(BigInteger)
    user_metadata: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    hyperparameters: Mapped[dict[str, Any]]
    config: Mapped[dict[str, Any]]
    """The TrainConfig of the run."""
    plan: Mapped[dict[str, Any]]
    predicted_seconds: Mapped[float | None]
    """By the plan; None: not known."""
    processes: Mapped[int]
    device: Mapped[str]
    gpu_ids: Mapped[list[int] | None] = mapped_column(JSON(none_as_null=True))
    """GPUs that it may have; None: all."""
    leased: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    """Devices of the current or last start."""
    is_test: Mapped[bool] = mapped_column(default=False)
    """Of `/multigpu/gpu/test`: it makes no model."""
    priority: Mapped[int] = mapped_column(default=0)
    place: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    """Where an administrator has put it in the queue (`scheduler.Place`); None: where it belongs by itself."""
    max_runtime: Mapped[float | None]
    """Seconds of running, over all starts."""
    idempotency_key: Mapped[str | None]
    created_at: Mapped[float] = mapped_column(index=True)
    queued_at: Mapped[float | None]
    """Of its first queueing: a resumed job does not lose its turn."""
    started_at: Mapped[float | None]
    """Of the current or last start."""
    finished_at: Mapped[float | None]
    state_at: Mapped[float]
    seconds_run: Mapped[float] = mapped_column(default=0.0)
    """Of all starts that have ended."""
    energy_joules: Mapped[float | None]
    """Of its GPUs, over all starts; None: not known."""
    token: Mapped[int] = mapped_column(default=0)
    """Of the current start; every start has a larger one."""
    crashes: Mapped[int] = mapped_column(default=0)
    """In a row, without a new checkpoint."""
    crashed_at_step: Mapped[int | None]
    preempted_by: Mapped[str | None]
    """Job of higher priority that it is paused for, until it starts again."""
    error: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    fine_tuned_model: Mapped[str | None] = mapped_column(Text)
    trained_tokens: Mapped[int | None] = mapped_column(BigInteger)
    model_deleted_at: Mapped[float | None]
    """When its user deleted the model; the name stays with the job."""
    result_files: Mapped[list[str]]
    events_offset: Mapped[int] = mapped_column(BigInteger, default=0)
    """Bytes of the run's event stream that are in `events`."""

    __table_args__ = (
        Index("ix_jobs_page", "owner", "created_at", "id"),
        Index("uq_jobs_idempotency", "owner", "idempotency_key", unique=True),
    )


class Event(Base):
    """What happened to a job: changes of its state, and what its run tells. Ids grow within a job."""

    __tablename__ = "events"

    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    created_at: Mapped[float]
    level: Mapped[str] = mapped_column(String(8))
    kind: Mapped[str]
    """`state`, or the kind of the run's event (`base.events`)."""
    message: Mapped[str] = mapped_column(Text)
    step: Mapped[int | None]
    data: Mapped[dict[str, Any]]

    __table_args__ = (
        Index("ix_events_job", "job_id", "id"),
        Index("ix_events_kind", "job_id", "kind", "id"),
        Index("ix_events_incidents", "id", sqlite_where=text(_INCIDENT), postgresql_where=text(_INCIDENT)),
    )


class Stretch(Base):
    """One start of a job and the devices that it held: what accounts are made of. Kept when the job is gone."""

    __tablename__ = "stretches"

    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(index=True)
    token: Mapped[int]
    owner: Mapped[str]
    model: Mapped[str] = mapped_column(Text)
    device: Mapped[str]
    """cuda or cpu."""
    devices: Mapped[int]
    started_at: Mapped[float]
    ended_at: Mapped[float | None]
    """None: it goes on."""
    energy_joules: Mapped[float | None]

    __table_args__ = (Index("ix_stretches_period", "started_at", "ended_at"),)


class Lease(Base):
    """A device or CPU slot that a job holds. `token` is that of the start that holds it."""

    __tablename__ = "leases"

    resource: Mapped[str] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), index=True)
    token: Mapped[int]
    created_at: Mapped[float]


class Upload(Base):
    """A file that comes in parts."""

    __tablename__ = "uploads"

    id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str] = mapped_column(index=True)
    status: Mapped[str] = mapped_column(String(16), index=True)
    """pending, completed, cancelled or expired."""
    purpose: Mapped[str]
    filename: Mapped[str] = mapped_column(Text)
    bytes: Mapped[int] = mapped_column(BigInteger)
    """Of the whole file, as announced."""
    created_at: Mapped[float]
    expires_at: Mapped[float]
    file_lifetime: Mapped[float | None]
    """Seconds that the file is to be kept; None: until it is deleted."""
    file_id: Mapped[str | None]
    """Of the completed file."""


class UploadPart(Base):
    """A part of an upload; its content lies in `uploads/<id>` of the data folder."""

    __tablename__ = "upload_parts"

    id: Mapped[str] = mapped_column(primary_key=True)
    upload_id: Mapped[str] = mapped_column(ForeignKey("uploads.id", ondelete="CASCADE"), index=True)
    bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[float]


class WebhookEndpoint(Base):
    """An address that is told about its owner's jobs."""

    __tablename__ = "webhook_endpoints"

    id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str] = mapped_column(index=True)
    name: Mapped[str]
    url: Mapped[str] = mapped_column(Text)
    event_types: Mapped[list[str]]
    secret: Mapped[str]
    """What signs deliveries; shown to its owner once."""
    old_secret: Mapped[str | None]
    """The one before, which signs beside it until `old_secret_until`."""
    old_secret_until: Mapped[float | None]
    created_at: Mapped[float]
    updated_at: Mapped[float]


class WebhookDelivery(Base):
    """An event on its way to an endpoint, written in the transaction of what happened."""

    __tablename__ = "webhook_deliveries"

    id: Mapped[str] = mapped_column(primary_key=True)
    endpoint_id: Mapped[str] = mapped_column(ForeignKey("webhook_endpoints.id", ondelete="CASCADE"), index=True)
    body: Mapped[str] = mapped_column(Text)
    attempts: Mapped[int] = mapped_column(default=0)
    created_at: Mapped[float]
    next_at: Mapped[float | None] = mapped_column(index=True)
    """When it is tried next; None: it has arrived, or was given up."""
    outcome: Mapped[str | None] = mapped_column(Text)
    """Of the last attempt."""


class MultiGPUSettings(Base):
    """What a user has set under `/multigpu`."""

    __tablename__ = "multigpu_settings"

    user: Mapped[str] = mapped_column(primary_key=True)
    gpus: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    """Fields of a GPUConfig."""
    training: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    """Fields of a TrainingConfig that its trainings have unless they set them."""


class DisabledDevice(Base):
    """A device or CPU slot that no job is given."""

    __tablename__ = "disabled_devices"

    resource: Mapped[str] = mapped_column(primary_key=True)
    user: Mapped[str]
    reason: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[float]


class Audit(Base):
    """Who changed what."""

    __tablename__ = "audit"

    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True)
    created_at: Mapped[float]
    user: Mapped[str]
    action: Mapped[str]
    target: Mapped[str]
    request_id: Mapped[str | None]
