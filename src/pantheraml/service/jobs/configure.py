"""Turn a request into the configuration and the plan of its run.

`auto` values are chosen here and shown with the job. A run that the planner predicts not to fit is refused before it is
queued.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pantheraml.base.errors import ConfigError
from pantheraml.planner.plan_run import Outlook, plan_run
from pantheraml.service.jobs.cpu_memory import slots_for
from pantheraml.service.schemas.fine_tuning import CreateJob, OwnSettings
from pantheraml.specs.config_file import validate
from pantheraml.specs.gpu_config import GPUConfig
from pantheraml.specs.plan import DeviceSpec, Plan

EPOCHS = 3
BATCH_SIZE = 16
LEARNING_RATE = 2e-4
SEQ_LEN = 2048
CHECKPOINT_EVERY_STEPS = 100
"""Steps that a crash loses at most."""


@dataclass(frozen=True)
class Inputs:
    """Paths behind the ids of a request."""

    model: Path
    training: Path
    rows: int
    validation: Path | None


@dataclass(frozen=True)
class PlannedJob:
    config: dict[str, Any]
    plan: Plan
    hyperparameters: dict[str, Any]
    jobs_per_gpu: int = 1
    slots: int = 1
    """CPU slots that it takes."""

    @property
    def devices(self) -> int:
        """GPUs or CPU slots to lease; one process of mode `dataparallel` uses several."""
        return max(self.plan.world_size, len(self.plan.device_ids), self.slots)

    @property
    def predicted_seconds(self) -> float | None:
        """With other jobs on its GPUs all the time, where they are shared; None: the time is not known."""
        seconds = self.plan.predicted_seconds
        return None if seconds is None else seconds * self.jobs_per_gpu

    @property
    def gpu_hours(self) -> float | None:
        """As predicted, whether others share its GPUs or not; None: the time is not known."""
        if self.plan.device == "cpu":
            return 0.0
        seconds = self.plan.predicted_seconds
        return None if seconds is None else self.devices * seconds / 3600.0


def configure(
    request: CreateJob,
    inputs: Inputs,
    seed: int,
    devices: DeviceSpec,
    gpus: GPUConfig | None = None,
    *,
    jobs_per_gpu: int = 1,
    memory_fraction: float | None = None,
    cpu_slots: int = 1,
) -> PlannedJob:
    """Resolve the request on this hardware. Raises what a run would raise before it starts.

    `gpus`: what its user has set for the GPUs. `memory_fraction`: share of their memory that any job may use.
    `cpu_slots`: slots that share this machine's memory, if it has no GPU.
    """
    hyperparameters = _chosen(request, inputs.rows)
    own = request.pantheraml
    settings = own.config.model_dump(exclude_unset=True)
    given = _conflicts(settings.get("train", {}))
    if given:
        raise ConfigError(f"{given} is set both by the request and by pantheraml.config.", fix="Keep one of them.")
    device = "cuda" if devices.gpus else "cpu"
    config = validate(
        {
            "model": {"path": str(inputs.model), **settings.get("model", {})},
            "data": {
                "path": str(inputs.training),
                "eval_path": None if inputs.validation is None else str(inputs.validation),
                "seq_len": default_seq_len(inputs.model),
                "packing": False,  # on OpenAI's wire a batch counts examples
                **settings.get("data", {}),
            },
            "method": settings.get("method", {}),
            "train": {
                "epochs": hyperparameters["n_epochs"],
                "global_batch_size": hyperparameters["batch_size"],
                "learning_rate": LEARNING_RATE * hyperparameters["learning_rate_multiplier"],
                "seed": seed,
                **settings.get("train", {}),
            },
            "stability": settings.get("stability", {}),
            "checkpoint": {"every_steps": CHECKPOINT_EVERY_STEPS, **settings.get("checkpoint", {})},
            "parallel": _parallel(own, devices, gpus, memory_fraction),
            "device": device,
        }
    )
    sequences = None if config.data.packing else float(inputs.rows)
    plan = plan_run(config, devices, outlook=Outlook(sequences), total_memory=True)
    config.parallel.world_size = plan.world_size
    slots = 1
    if plan.device == "cpu" and devices.ram_bytes is not None:
        slots, needed = slots_for(config, plan, cpu_slots, devices.ram_bytes)
        if slots > plan.world_size and needed is not None:
            told = f"it takes {slots} of {cpu_slots} CPU slots, as it needs at least {needed / 2**30:.1f} GiB of memory"
            plan = plan.model_copy(update={"warnings": (*plan.warnings, told)})
    if jobs_per_gpu > 1:
        told = f"up to {jobs_per_gpu} jobs share a GPU: it may take {jobs_per_gpu} times as long as predicted"
        plan = plan.model_copy(update={"warnings": (*plan.warnings, told)})
    return PlannedJob(config.to_dict(), plan, hyperparameters, jobs_per_gpu, slots)


def _chosen(request: CreateJob, rows: int) -> dict[str, Any]:
    wanted = request.wanted()
    return {
        "n_epochs": wanted.n_epochs or EPOCHS,
        "batch_size": wanted.batch_size or min(BATCH_SIZE, rows),
        "learning_rate_multiplier": wanted.learning_rate_multiplier or 1.0,
    }


def _parallel(
    own: OwnSettings, devices: DeviceSpec, gpus: GPUConfig | None, memory_fraction: float | None
) -> dict[str, Any]:
    chosen: dict[str, Any] = {} if memory_fraction is None else {"memory_fraction": memory_fraction}
    if gpus is not None:
        parallel = gpus.to_multi_gpu_config()
        chosen |= {"backend": parallel.backend, "sync_bn": parallel.sync_bn}
        if devices.gpus:
            chosen["memory_fraction"] = min(gpus.memory_fraction, memory_fraction or 1.0)
    if own.mode == "dataparallel":  # one process; which GPUs it gets is decided when it starts
        indices = [gpu.index for gpu in devices.gpus[: own.processes]]
        return {"mode": own.mode, "device_ids": indices or None, **chosen}
    return {"mode": own.mode, "world_size": own.processes, **chosen}


OF_THE_REQUEST = {"epochs": "n_epochs", "global_batch_size": "batch_size", "learning_rate": "learning_rate_multiplier"}


def _conflicts(train: dict[str, Any]) -> str:
    return ", ".join(f"train.{name}" for name in (*OF_THE_REQUEST, "seed") if name in train)


def default_seq_len(model: Path) -> int:
    """Return our default, or the model's number of positions if that is smaller."""
    try:
        positions = json.loads((model / "config.json").read_text()).get("max_position_embeddings")
    except (OSError, ValueError):
        return SEQ_LEN
    return min(SEQ_LEN, positions) if isinstance(positions, int) and positions > 0 else SEQ_LEN
