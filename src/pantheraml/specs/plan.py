"""The detected hardware and the decisions for a run: DeviceSpec, Choice, Plan."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from pantheraml.specs.frozen_model import FrozenModel
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.prediction import Alternative, Prediction
from pantheraml.specs.train import Checkpointing, SplitStrategy


class GPU(FrozenModel):
    """One GPU as reported by the driver; None: not reported."""

    index: int
    name: str
    total_bytes: int | None
    free_bytes: int | None
    compute_capability: tuple[int, int] | None
    mig_uuid: str | None = None
    """UUID by which CUDA_VISIBLE_DEVICES names this MIG instance of GPU `index`; None: a whole GPU."""


class DeviceSpec(FrozenModel):
    """Hardware of this machine."""

    gpus: tuple[GPU, ...]
    cpu_count: int
    ram_bytes: int | None
    """None: not known, of hardware that is only described."""
    driver: str | None
    """Driver version; None without an NVIDIA driver."""
    driver_cuda: str | None = None
    """Newest CUDA version that the driver supports, such as 13.0; None: no driver, or not reported."""
    note: str | None = None
    """Why there is no GPU; None if there are any."""
    selection: str | None = None
    """Why these GPUs were selected for a run; None: they are all visible GPUs."""


class Choice(FrozenModel):
    """One decision: config key, value, reason, and whether the planner (automatic) or the user made it."""

    name: str
    value: Any
    reason: str
    automatic: bool


class LayerSplit(FrozenModel):
    """Split of a model's layers over the devices of one process; `cuda:0` is its first GPU."""

    device_map: SplitStrategy | dict[str, str]
    """Strategy, or module -> device."""
    max_memory: dict[str, int | str] | None

    @property
    def over_several(self) -> bool:
        """True if more than one device may hold layers."""
        return isinstance(self.device_map, str) or len(set(self.device_map.values())) > 1


class PlanInputs(FrozenModel):
    """The inputs of a plan, so that it can be rejected for any others."""

    config: dict[str, Any]
    model_digest: str | None
    """Digest of its config.json; None: a model known only by its name."""
    data_digest: str | None
    """None: planned without data."""
    gpus: tuple[GPU, ...]
    """GPUs of a node."""


class Plan(FrozenModel):
    """All decisions made before a run starts. Printed, stored as plan.json, and read by the workers."""

    device: Literal["cpu", "cuda"]
    device_ids: tuple[int, ...]
    """GPU indices: one per local rank, or all GPUs of a single process; empty on CPU."""
    world_size: int
    dims: ParallelDims
    backend: Literal["nccl", "gloo"]
    precision: Literal["fp32", "bf16", "fp16"]
    frozen_weights: Literal["fp8", "int8", "nf4"] | None
    """Quantization of the frozen weights; None: not quantized."""
    fp8_matmuls: bool = False
    """Full fine-tune with fp8 matmuls in decoder layers; weight gradients are fp8 only when fused."""
    fused: bool
    """Fused kernels for decoder layers of supported families."""
    cuda_graph: bool
    """Capture a step as a CUDA graph and replay it."""
    compile: bool
    """torch.compile for layers that are not fused."""
    global_batch_size: int
    micro_batch_size: int
    """Sequences per forward pass of a process, over all its devices."""
    activation_checkpointing: Checkpointing
    threads_per_process: int
    predicted_memory_bytes: int | None
    """Memory per device; None: not predicted."""
    predicted_seconds: float | None
    choices: tuple[Choice, ...]
    copies: bool = False
    """DataParallel: one process that replicates the model on its GPUs for every batch."""
    mig_uuid: str | None = None
    """UUID of the MIG instance that the run uses; None: whole GPUs."""
    memory_fraction: float | None = None
    """Share of each GPU's memory that a process may use; None: all."""
    split: LayerSplit | None = None
    """Split of the layers over the devices of one process; None: all on one device."""
    warnings: tuple[str, ...] = ()
    """Settings without effect, and other warnings about the configuration."""
    fits: int | None = None
    """Micro-batch size after reductions because of out-of-memory errors in this run; None: not reduced."""
    prediction: Prediction | None = None
    """Memory, time, cost and energy of the run; None: not predicted."""
    alternatives: tuple[Alternative, ...] = ()
    """Other plans that were compared, the best first."""
    made_for: PlanInputs | None = None
    """Set in plans that `pantheraml plan --json` prints, which `train --plan` replays."""

    @model_validator(mode="before")
    @classmethod
    def _drop_removed(cls, values: Any) -> Any:
        """Read the plans of earlier versions, too."""
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if key != "fp8_layouts"}

    def reason(self, name: str) -> str:
        return next(choice.reason for choice in self.choices if choice.name == name)
