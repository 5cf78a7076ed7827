"""Tables of the service. `migrations/` creates them; a test compares both.

Times are seconds since 1970, as in OpenAI's API, and sorted alike by every database.
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
    """An uploaded or generated file; its content is `files/<id>` in the data folder."""

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
    """Changed only by `store.jobs.move`."""
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
    """Predicted by the plan; None: unknown."""
    processes: Mapped[int]
    device: Mapped[str]
    gpu_ids: Mapped[list[int] | None] = mapped_column(JSON(none_as_null=True))
    """GPUs that it may use; None: all."""
    leased: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    """Devices of the current or last start."""
    is_test: Mapped[bool] = mapped_column(default=False)
    """A job of `/multigpu/gpu/test`, which makes no model."""
    priority: Mapped[int] = mapped_column(default=0)
    place: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    """Position set by an administrator (`scheduler.Place`); None: by the scheduler's order."""
    max_runtime: Mapped[float | None]
    """Seconds of running, over all starts."""
    idempotency_key: Mapped[str | None]
    created_at: Mapped[float] = mapped_column(index=True)
    queued_at: Mapped[float | None]
    """When it was first queued: a resumed job keeps its turn."""
    started_at: Mapped[float | None]
    """Beginning of the current or last start."""
    finished_at: Mapped[float | None]
    state_at: Mapped[float]
    seconds_run: Mapped[float] = mapped_column(default=0.0)
    """Seconds of all finished starts."""
    energy_joules: Mapped[float | None]
    """Energy of its GPUs over all starts; None: unknown."""
    token: Mapped[int] = mapped_column(default=0)
    """Fencing token of the current start; it grows with every start."""
    crashes: Mapped[int] = mapped_column(default=0)
    """Consecutive crashes without a new checkpoint."""
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
    """An event of a job: a change of its state, or an event of its run. Ids grow within a job."""

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
    """One start of a job and the devices it held, for accounting. Outlives the job."""

    __tablename__ = "stretches"

    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(index=True)
    token: Mapped[int]
    owner: Mapped[str]
    model: Mapped[str] = mapped_column(Text)
    device: Mapped[str]
    """cuda or cpu."""
    devices: Mapped[int]
    share: Mapped[float] = mapped_column(default=1.0)
    """Part of each of its devices that it held."""
    started_at: Mapped[float]
    ended_at: Mapped[float | None]
    """None: still running."""
    energy_joules: Mapped[float | None]

    __table_args__ = (Index("ix_stretches_period", "started_at", "ended_at"),)


class Lease(Base):
    """A device or CPU slot that a job holds. `token`: of the start that holds it."""

    __tablename__ = "leases"

    resource: Mapped[str] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), index=True)
    token: Mapped[int]
    created_at: Mapped[float]


class Upload(Base):
    """A multipart upload."""

    __tablename__ = "uploads"

    id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str] = mapped_column(index=True)
    status: Mapped[str] = mapped_column(String(16), index=True)
    """pending, completed, cancelled or expired."""
    purpose: Mapped[str]
    filename: Mapped[str] = mapped_column(Text)
    bytes: Mapped[int] = mapped_column(BigInteger)
    """Announced size of the whole file."""
    created_at: Mapped[float]
    expires_at: Mapped[float]
    file_lifetime: Mapped[float | None]
    """Seconds until the file expires; None: never."""
    file_id: Mapped[str | None]
    """Id of the completed file."""


class UploadPart(Base):
    """A part of an upload; its content is `uploads/<id>` in the data folder."""

    __tablename__ = "upload_parts"

    id: Mapped[str] = mapped_column(primary_key=True)
    upload_id: Mapped[str] = mapped_column(ForeignKey("uploads.id", ondelete="CASCADE"), index=True)
    bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[float]


class WebhookEndpoint(Base):
    """A URL that is notified of its owner's jobs."""

    __tablename__ = "webhook_endpoints"

    id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str] = mapped_column(index=True)
    name: Mapped[str]
    url: Mapped[str] = mapped_column(Text)
    event_types: Mapped[list[str]]
    secret: Mapped[str]
    """Signs deliveries; shown to its owner once."""
    old_secret: Mapped[str | None]
    """The previous secret, which also signs until `old_secret_until`."""
    old_secret_until: Mapped[float | None]
    created_at: Mapped[float]
    updated_at: Mapped[float]


class WebhookDelivery(Base):
    """An event to be delivered to an endpoint, written in the transaction that caused it."""

    __tablename__ = "webhook_deliveries"

    id: Mapped[str] = mapped_column(primary_key=True)
    endpoint_id: Mapped[str] = mapped_column(ForeignKey("webhook_endpoints.id", ondelete="CASCADE"), index=True)
    body: Mapped[str] = mapped_column(Text)
    attempts: Mapped[int] = mapped_column(default=0)
    created_at: Mapped[float]
    next_at: Mapped[float | None] = mapped_column(index=True)
    """Time of the next attempt; None: delivered, or given up."""
    outcome: Mapped[str | None] = mapped_column(Text)
    """Outcome of the last attempt."""


class UserSettings(Base):
    """A user's settings under `/multigpu`."""

    __tablename__ = "multigpu_settings"

    user: Mapped[str] = mapped_column(primary_key=True)
    gpus: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    """Fields of a GPUConfig."""
    training: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    """Default fields of the TrainingConfig of the user's trainings."""


class DisabledDevice(Base):
    """A device or CPU slot that is not given to jobs."""

    __tablename__ = "disabled_devices"

    resource: Mapped[str] = mapped_column(primary_key=True)
    user: Mapped[str]
    reason: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[float]


class DataFolderId(Base):
    """The one data folder whose files and jobs the database knows."""

    __tablename__ = "data_folder"

    id: Mapped[str] = mapped_column(primary_key=True)
    """As in `service.id` of that folder."""


class Audit(Base):
    """Audit log."""

    __tablename__ = "audit"

    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True)
    created_at: Mapped[float]
    user: Mapped[str]
    action: Mapped[str]
    target: Mapped[str]
    request_id: Mapped[str | None]
