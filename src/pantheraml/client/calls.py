"""The calls of the service's API, as values that both clients send: method, path, parameters, and what comes back."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from pantheraml.base.errors import ServiceError
from pantheraml.client.answers import Artifact, File, Job, JobEvent, JobPlan, Merge, Model, Page, Series
from pantheraml.specs.service_api import Devices, Overview, Queue, UsageReport

Answer = TypeVar("Answer")
JOBS = "/v1/fine_tuning/jobs"


@dataclass(frozen=True)
class Call(Generic[Answer]):
    method: str
    path: str
    parse: Callable[[Any], Answer]
    params: Mapping[str, Any] = field(default_factory=dict)
    json: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)


class Submission(BaseModel):
    """Arguments of `jobs.submit` and `jobs.plan`. None: chosen by the service."""

    model: str
    training_file: str
    """Id of an uploaded file."""
    validation_file: str | None = None
    suffix: str | None = None
    """Part of the name of the fine-tuned model."""
    seed: int | None = None
    metadata: dict[str, str] | None = None
    epochs: int | None = None
    batch_size: int | None = None
    learning_rate_multiplier: float | None = None
    processes: int | None = None
    """GPUs or, without any, CPU processes."""
    mode: Literal["auto", "dataparallel", "distributed"] = "auto"
    priority: int = 0
    hold: bool = False
    """Submit it paused."""
    max_runtime_seconds: float | None = None
    config: dict[str, Any] = {}
    """Settings of the run, as in a configuration file."""

    def body(self) -> dict[str, Any]:
        hyperparameters = {
            "n_epochs": self.epochs,
            "batch_size": self.batch_size,
            "learning_rate_multiplier": self.learning_rate_multiplier,
        }
        own = {
            "processes": self.processes,
            "mode": self.mode,
            "priority": self.priority,
            "hold": self.hold,
            "max_runtime_seconds": self.max_runtime_seconds,
            "config": self.config,
        }
        plain = self.model_dump(
            include={"model", "training_file", "validation_file", "suffix", "seed", "metadata"}, exclude_none=True
        )
        chosen = {name: value for name, value in hyperparameters.items() if value is not None}
        return {
            **plain,
            "method": {"type": "supervised", "supervised": {"hyperparameters": chosen}},
            "pantheraml": {name: value for name, value in own.items() if value is not None},
        }


def _job(job_id: str, *rest: str) -> str:
    """Path of a job; the id is quoted, so that it cannot lead elsewhere."""
    return "/".join((JOBS, quote(job_id, safe=""), *rest))


def _items(model: type[BaseModel]) -> Callable[[Any], list[Any]]:
    return lambda body: [model.model_validate(item) for item in body["data"]]


def submit(submission: Submission) -> Call[Job]:
    """Submit a job. Its idempotency key ensures that a submission that is sent twice makes one job."""
    headers = {"idempotency-key": secrets.token_hex(16)}
    return Call("POST", JOBS, Job.model_validate, json=submission.body(), headers=headers)


def plan(submission: Submission) -> Call[JobPlan]:
    return Call("POST", JOBS, JobPlan.model_validate, {"dry_run": "true"}, submission.body())


def list_jobs(after: str | None, limit: int) -> Call[Page[Job]]:
    params = {"limit": limit} | ({} if after is None else {"after": after})
    return Call("GET", JOBS, Page[Job].model_validate, params)


def get_job(job_id: str) -> Call[Job]:
    return Call("GET", _job(job_id), Job.model_validate)


def change_job(job_id: str, action: Literal["pause", "resume", "cancel"]) -> Call[Job]:
    return Call("POST", _job(job_id, action), Job.model_validate)


def delete_checkpoints(job_id: str) -> Call[None]:
    return Call("DELETE", _job(job_id, "checkpoints"), lambda body: None)


def events(job_id: str, limit: int) -> Call[list[JobEvent]]:
    return Call("GET", _job(job_id, "events"), _items(JobEvent), {"limit": limit})


def stream_path(job_id: str) -> str:
    return _job(job_id, "stream")


def logs_path(job_id: str) -> str:
    return _job(job_id, "logs")


def series(job_id: str, metric: str, after: int, points: int | None) -> Call[Series]:
    params: dict[str, Any] = {"metric": metric, "after": after}
    return Call("GET", _job(job_id, "series"), Series.model_validate, params | ({"points": points} if points else {}))


def artifacts(job_id: str) -> Call[list[Artifact]]:
    return Call("GET", _job(job_id, "artifacts"), _items(Artifact))


def merge(job_id: str, method: Literal["GET", "POST"]) -> Call[Merge]:
    return Call(method, _job(job_id, "merge"), Merge.model_validate)


def merged(answer: Merge) -> bool:
    """Whether it is; ServiceError if it could not be."""
    if answer.status == "failed":
        raise ServiceError(
            f"The model of {answer.job} could not be merged: {answer.error}",
            fix="Download its adapter, and merge it yourself: PEFT's merge_and_unload.",
        )
    return answer.status == "merged"


def artifact_path(job_id: str, name: str) -> str:
    return _job(job_id, "artifacts", quote(name))


def list_files(purpose: str | None) -> Call[list[File]]:
    return Call("GET", "/v1/files", _items(File), {} if purpose is None else {"purpose": purpose})


def get_file(file_id: str) -> Call[File]:
    return Call("GET", f"/v1/files/{quote(file_id, safe='')}", File.model_validate)


def delete_file(file_id: str) -> Call[None]:
    return Call("DELETE", f"/v1/files/{quote(file_id, safe='')}", lambda body: None)


def content_path(file_id: str) -> str:
    return f"/v1/files/{quote(file_id, safe='')}/content"


def models() -> Call[list[Model]]:
    return Call("GET", "/v1/models", _items(Model))


def gpus() -> Call[Devices]:
    return Call("GET", "/v1/gpus", Devices.model_validate)


def queue(limit: int) -> Call[Queue]:
    return Call("GET", "/v1/queue", Queue.model_validate, {"limit": limit})


def move(job_id: str, before: str | None) -> Call[Queue]:
    return Call("POST", "/v1/queue/move", Queue.model_validate, json={"job": job_id, "before": before})


def overview() -> Call[Overview]:
    return Call("GET", "/v1/overview", Overview.model_validate)


def usage(group_by: str, start: float | None, end: float | None) -> Call[UsageReport]:
    given = {"group_by": group_by, "start": start, "end": end}
    params = {name: value for name, value in given.items() if value is not None}
    return Call("GET", "/v1/usage", UsageReport.model_validate, params)


def take(pages: Sequence[Job], limit: int | None) -> int:
    """How many to ask for next."""
    return 100 if limit is None else min(100, limit - len(pages))
