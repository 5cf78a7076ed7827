"""Values that describe the hardware and what was decided for a run: DeviceSpec, Choice, Plan."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.train import Checkpointing, SplitStrategy

Layouts = Literal[1, 2]
"""Of frozen fp8 weights: as the forward products read them, or also as the backward ones do."""


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


class LayerSplit(Value):
    """Where the layers of a model go that one process spreads over its devices, of which `cuda:0` is the first."""

    device_map: SplitStrategy | dict[str, str]
    """How to decide, or module -> device."""
    max_memory: dict[str, int | str] | None

    @property
    def over_several(self) -> bool:
        """Whether more than one device may come to hold layers."""
        return isinstance(self.device_map, str) or len(set(self.device_map.values())) > 1


class Plan(Value):
    """Everything decided before a run starts. Printed, stored as plan.json, and read by the workers."""

    device: Literal["cpu", "cuda"]
    device_ids: tuple[int, ...]
    """GPU indices, one per local rank, or all of a process that has several; empty on CPU."""
    world_size: int
    dims: ParallelDims
    """How the processes divide the work."""
    backend: Literal["nccl", "gloo"]
    precision: Literal["fp32", "bf16", "fp16"]
    frozen_weights: Literal["fp8", "int8", "nf4"] | None
    """How weights that are not trained are kept; None: as they are."""
    fp8_layouts: Layouts = 1
    """How often frozen fp8 weights are kept; 2 comes down to 1 where the loaded weights are too large for that."""
    fp8_products: bool = False
    """Trained decoder layers multiply in fp8; where they are fused, also for the gradients of weights."""
    fused: bool
    """Decoder layers run as fused kernels where their family is known."""
    cuda_graph: bool
    """A step's kernels are recorded once and replayed."""
    compile: bool
    """Layers that are not fused are compiled."""
    global_batch_size: int
    micro_batch_size: int
    """Sequences of one forward pass of a process, over all its devices."""
    activation_checkpointing: Checkpointing
    threads_per_process: int
    predicted_memory_bytes: int | None
    """Per device. None: not predicted."""
    predicted_seconds: float | None
    choices: tuple[Choice, ...]
    copies: bool = False
    """One process, and a copy of the model on each of its GPUs for every batch (DataParallel)."""
    split: LayerSplit | None = None
    """One process, and the model's layers spread over its devices; None: all on one."""
    warnings: tuple[str, ...] = ()
    """What the configuration says and the run will not do."""
    fits: int | None = None
    """What `micro_batch_size` came down to in this run, because more ran out of memory; None: it has not."""

    def reason(self, name: str) -> str:
        return next(choice.reason for choice in self.choices if choice.name == name)
