"""Bodies of the fine-tuning endpoints: OpenAI's fields, and ours in one object, `pantheraml`."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from pantheraml.service.jobs.states import OPENAI_STATUS, State
from pantheraml.service.jobs.usage import cost_of, device_hours_of
from pantheraml.service.store.tables import Event, Job


def _chosen_here(value: Any) -> Any:
    return None if value == "auto" else value


_Auto = BeforeValidator(_chosen_here)
METRIC_KINDS = ("train.step", "eval.done")
"""Kinds of events that carry the figures of a step."""
CHECKPOINT = ":ckpt-step-"
"""In the name of a checkpoint, after that of its model."""
MOST_PAIRS = 16
"""Pairs of metadata that a job may have."""
FileId = Annotated[str, Field(max_length=64)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Hyperparameters(_Body):
    """None stands for `auto`: chosen here, and shown with the job."""

    batch_size: Annotated[int | None, Field(ge=1, le=1 << 20), _Auto] = None
    learning_rate_multiplier: Annotated[float | None, Field(gt=0, le=1e6), _Auto] = None
    n_epochs: Annotated[int | None, Field(ge=1, le=10_000), _Auto] = None


class Supervised(_Body):
    hyperparameters: Hyperparameters = Hyperparameters()


class Method(_Body):
    type: Literal["supervised", "dpo", "reinforcement"]
    supervised: Supervised | None = None
    dpo: dict[str, Any] | None = None
    reinforcement: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _only_supervised(self) -> Method:
        if self.type != "supervised" or self.dpo is not None or self.reinforcement is not None:
            raise ValueError("only the method `supervised` is available here")
        return self


class DataKeys(_Body):
    seq_len: Any = None
    packing: Any = None
    on_long_row: Any = None


class ModelKeys(_Body):
    precision: Any = None


class CheckpointKeys(_Body):
    every_steps: Any = None
    keep: Any = None
    final: Any = None


class RunSettings(_Body):
    """Settings of the run, with the names, types and bounds of a configuration file. Keys that name files, code or
    devices are excluded."""

    data: DataKeys = DataKeys()
    model: ModelKeys = ModelKeys()
    method: dict[str, Any] = {}
    train: dict[str, Any] = {}
    stability: dict[str, Any] = {}
    checkpoint: CheckpointKeys = CheckpointKeys()


class OwnSettings(_Body):
    """Fields beyond OpenAI's API."""

    processes: Annotated[int, Field(ge=1, le=4096)] | None = None
    """GPUs, or CPU processes where there are none; None = chosen by the planner."""
    mode: Literal["auto", "dataparallel", "distributed"] = "auto"
    """parallel.mode of the configuration."""
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    """Jobs of higher priority start first; above 0 needs the scope `admin`."""
    hold: bool = False
    """Submit it paused; it waits for `resume`."""
    max_runtime_seconds: Annotated[float, Field(gt=0)] | None = None
    config: RunSettings = RunSettings()


class CreateJob(_Body):
    model: Annotated[str, Field(max_length=512)]
    training_file: FileId
    validation_file: FileId | None = None
    suffix: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = None
    method: Method | None = None
    hyperparameters: Hyperparameters | None = None
    """Deprecated location of `method.supervised.hyperparameters`."""
    integrations: list[dict[str, Any]] | None = None
    pantheraml: OwnSettings = OwnSettings()

    @field_validator("metadata")
    @classmethod
    def _few(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        if value is not None and len(value) > MOST_PAIRS:
            raise ValueError(f"at most {MOST_PAIRS} pairs")
        if any("\0" in text for pair in (value or {}).items() for text in pair):
            raise ValueError("null characters cannot be stored")
        return value

    @field_validator("integrations")
    @classmethod
    def _none(cls, value: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        if value:
            raise ValueError("integrations are not available here: keys of other services are not accepted")
        return value

    def wanted(self) -> Hyperparameters:
        of_method = self.method.supervised.hyperparameters if self.method and self.method.supervised else None
        return of_method or self.hyperparameters or Hyperparameters()


class Waiting(BaseModel):
    """Why a job is not running yet."""

    reason: str
    queue_position: int | None = None
    """Position in the queue, from 1; None: not queued."""
    estimated_start: int | None = None
    """Seconds since 1970; None: not known."""


def job_object(
    job: Job,
    waiting: Waiting | None = None,
    price_per_gpu_hour: float | None = None,
    expected_end: float | None = None,
) -> dict[str, Any]:
    """A job in OpenAI's form, with our own fields added."""
    hours = device_hours_of(job)
    gpu_hours = hours if job.device == "cuda" else 0.0
    state = State(job.state)
    return {
        "id": job.id,
        "object": "fine_tuning.job",
        "created_at": int(job.created_at),
        "finished_at": None if job.finished_at is None else int(job.finished_at),
        "estimated_finish": None if expected_end is None or state is not State.RUNNING else int(expected_end),
        "model": job.model,
        "fine_tuned_model": job.fine_tuned_model,
        "user_provided_suffix": job.suffix,
        "organization_id": job.owner,
        "status": OPENAI_STATUS[state],
        "training_file": job.training_file,
        "validation_file": job.validation_file,
        "result_files": job.result_files,
        "trained_tokens": job.trained_tokens,
        "seed": job.seed,
        "hyperparameters": job.hyperparameters,
        "method": {"type": "supervised", "supervised": {"hyperparameters": job.hyperparameters}},
        "integrations": [],
        "metadata": job.user_metadata,
        "error": job.error,
        "state": state.value,
        "state_since": int(job.state_at),
        "priority": job.priority,
        "processes": job.processes,
        "device": job.device,
        "starts": job.token,
        "preempted_by": job.preempted_by,
        "gpu_hours": round(gpu_hours, 6),
        "cpu_slot_hours": round(hours - gpu_hours, 6),
        "energy_joules": job.energy_joules,
        "cost": cost_of(gpu_hours, price_per_gpu_hour),
        "waiting_reason": None if waiting is None else waiting.reason,
        "queue_position": None if waiting is None else waiting.queue_position,
        "estimated_start": None if waiting is None else waiting.estimated_start,
    }


SHOWN = (Event.id, Event.created_at, Event.level, Event.kind, Event.message, Event.step, Event.data)
"""Columns that `event_object` shows."""


def event_object(event: Event) -> dict[str, Any]:
    return {
        "id": f"ftevent-{event.id}",
        "object": "fine_tuning.job.event",
        "created_at": int(event.created_at),
        "level": event.level,
        "message": event.message,
        "type": "metrics" if event.kind in METRIC_KINDS else "message",
        "data": event.data,
        "kind": event.kind,
    }


def checkpoint_object(event: Event, job: Job, metrics: dict[str, Any]) -> dict[str, Any]:
    """`event`: that of the saved checkpoint."""
    known = {name: value for name, value in metrics.items() if isinstance(value, int | float) and math.isfinite(value)}
    return {
        "id": f"ftckpt-{event.id}",
        "object": "fine_tuning.job.checkpoint",
        "created_at": int(event.created_at),
        "fine_tuned_model_checkpoint": f"{model_name(job)}{CHECKPOINT}{event.step}",
        "fine_tuning_job_id": job.id,
        "step_number": event.step,
        "metrics": {"step": event.step, **known},
    }


def model_name(job: Job) -> str:
    """Name of the model that a job makes, in OpenAI's form."""
    return f"ft:{job.model}:{job.owner}:{job.suffix or ''}:{job.id[-8:]}"
