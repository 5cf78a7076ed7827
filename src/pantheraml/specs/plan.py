"""Values that describe the hardware and what was decided for a run: DeviceSpec, Choice, Plan."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.train import Checkpointing


class Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GPU(Value):
    """One GPU as the driver describes it; what the driver does not tell is None."""

    index: int
    name: str
    total_bytes: int | None
    free_bytes: int | None
    compute_capability: tuple[int, int] | None


class DeviceSpec(Value):
    """What hardware is here."""

    gpus: tuple[GPU, ...]
    cpu_count: int
    ram_bytes: int
    driver: str | None
    """Driver version, or None without an NVIDIA driver."""
    note: str | None = None
    """Why no GPU was found, if none was."""


class Choice(Value):
    """One decision: its name in the config, the value, why, and whether the user or the planner made it."""

    name: str
    value: Any
    reason: str
    automatic: bool


class Plan(Value):
    """Everything decided before a run starts. Printed, stored as plan.json, and read by the workers."""

    device: Literal["cpu", "cuda"]
    device_ids: tuple[int, ...]
    """GPU indices, one per local rank; empty on CPU."""
    world_size: int
    dims: ParallelDims
    """How the processes divide the work."""
    backend: Literal["nccl", "gloo"]
    precision: Literal["fp32", "bf16", "fp16"]
    frozen_weights: Literal["fp8", "int8", "nf4"] | None
    """How weights that are not trained are kept; None: as they are."""
    fused: bool
    """Decoder layers run as fused kernels where their family is known."""
    cuda_graph: bool
    """A step's kernels are recorded once and replayed."""
    compile: bool
    """Layers that are not fused are compiled."""
    global_batch_size: int
    micro_batch_size: int
    activation_checkpointing: Checkpointing
    threads_per_process: int
    predicted_memory_bytes: int | None
    """Per device. None: not predicted."""
    predicted_seconds: float | None
    choices: tuple[Choice, ...]

    def reason(self, name: str) -> str:
        return next(choice.reason for choice in self.choices if choice.name == name)
