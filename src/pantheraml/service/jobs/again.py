"""A job's configuration as its user may read it, and the request that repeats the job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pantheraml.service.jobs.configure import CHECKPOINT_EVERY_STEPS, OF_THE_REQUEST
from pantheraml.service.store.tables import Job
from pantheraml.specs.train import CheckpointConfig, MethodConfig, StabilityConfig, TrainSettings

_DEFAULTS: dict[str, dict[str, Any]] = {
    "data": {"seq_len": None, "packing": False, "on_long_row": "truncate"},
    "model": {"precision": "auto"},
    "checkpoint": {"every_steps": CHECKPOINT_EVERY_STEPS, "keep": CheckpointConfig().keep, "final": "last"},
}
"""Keys that a request may set, and the service's defaults; `seq_len` depends on the model."""


def shown_config(value: Any, hide: Callable[[str], str]) -> Any:
    """The configuration without this machine's folders."""
    if isinstance(value, dict):
        return {key: shown_config(inner, hide) for key, inner in value.items()}
    if isinstance(value, list):
        return [shown_config(inner, hide) for inner in value]
    return hide(value) if isinstance(value, str) else value


def request_of(job: Job) -> dict[str, Any]:
    """Return the body of `POST /v1/fine_tuning/jobs` that repeats the job, without settings that equal the defaults."""
    config = job.config
    sections: dict[str, Any] = {
        name: {key: config[name][key] for key, default in keys.items() if config[name][key] != default}
        for name, keys in _DEFAULTS.items()
    }
    for name, model in (("method", MethodConfig), ("train", TrainSettings), ("stability", StabilityConfig)):
        defaults = model().model_dump(mode="json")
        sections[name] = {key: value for key, value in config.get(name, {}).items() if value != defaults.get(key)}
    for key in (*OF_THE_REQUEST, "seed"):
        sections["train"].pop(key, None)
    parallel = config.get("parallel", {})
    return {
        "model": job.model,
        "training_file": job.training_file,
        "validation_file": job.validation_file,
        "suffix": job.suffix,
        "seed": job.seed,
        "metadata": job.user_metadata,
        "hyperparameters": job.hyperparameters,
        "pantheraml": {
            # on a CPU, it may have taken more slots than it has processes
            "processes": parallel.get("world_size", job.processes) if job.device == "cpu" else job.processes,
            "mode": parallel.get("mode", "auto"),
            "max_runtime_seconds": job.max_runtime,
            "config": {name: values for name, values in sections.items() if values},
        },
    }
