"""Response models of the client. Fields that a newer service adds are kept."""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from pantheraml.specs.plan import Plan

Item = TypeVar("Item")

ENDED = frozenset({"succeeded", "failed", "cancelled"})
"""Final states of a job."""


class _Answer(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())


class JobError(_Answer):
    code: str | None = None
    message: str
    param: str | None = None


class Job(_Answer):
    """A fine-tuning job. `state` is exact; `status` is one of OpenAI's six."""

    id: str
    created_at: int
    finished_at: int | None
    estimated_finish: int | None = None
    model: str
    fine_tuned_model: str | None
    organization_id: str
    status: str
    state: str
    training_file: str
    validation_file: str | None
    result_files: list[str]
    trained_tokens: int | None
    seed: int
    hyperparameters: dict[str, Any]
    metadata: dict[str, str] | None = None
    error: JobError | None
    priority: int
    processes: int
    device: str
    starts: int
    preempted_by: str | None = None
    """Job of higher priority that this one was paused for."""
    waiting_reason: str | None
    queue_position: int | None
    estimated_start: int | None
    gpu_hours: float
    cpu_slot_hours: float
    energy_joules: float | None
    cost: float | None

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED


class JobEvent(_Answer):
    id: str
    created_at: int
    level: str
    kind: str
    message: str
    type: str
    data: dict[str, Any]


class File(_Answer):
    id: str
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: str
    rows: int | None
    sha256: str


class Artifact(_Answer):
    """A file that a job has written: trained weights, the report, the summary."""

    name: str
    bytes: int


class Model(_Answer):
    id: str
    created: int
    owned_by: str


class JobPlan(_Answer):
    """The plan of a job that is not submitted yet."""

    hyperparameters: dict[str, Any]
    predicted_seconds: float | None
    predicted_gpu_hours: float | None
    predicted_cost: float | None
    """None: the time is not known, or the service has no price."""
    plan: Plan


class Merge(_Answer):
    """How far a model is from being in one piece."""

    object: Literal["fine_tuning.merge"] = "fine_tuning.merge"
    job: str
    status: Literal["none", "merging", "merged", "failed"]
    error: str | None = None


class Series(_Answer):
    """A figure over the steps; the next call takes `cursor` as `after`."""

    metric: str
    steps: list[int]
    values: list[float]
    total: int
    cursor: int


class Page(_Answer, Generic[Item]):
    data: list[Item]
    has_more: bool
