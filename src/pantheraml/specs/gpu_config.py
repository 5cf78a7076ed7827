"""`GPUConfig`: a short form of which GPUs to use and how; it translates to sections of the configuration."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from pantheraml.specs.multi_gpu import MultiGPUConfig, MultiGPUMode
from pantheraml.specs.own_loop_configs import OwnLoopConfig

_Switch = Annotated[bool, Field(strict=True)]


class GPUConfig(OwnLoopConfig):
    PAGE = "docs/own-loop.md"

    use_multi_gpu: _Switch = True
    """False: one GPU."""
    gpu_ids: list[Annotated[int, Field(ge=0, strict=True)]] = Field(default_factory=list)
    """GPU indices to use, as shown by `pantheraml gpus`; empty = those that are healthy and free."""
    distributed_training: _Switch = False
    """One process per GPU (DistributedDataParallel); False: one process with a replica per GPU (DataParallel)."""
    backend: Literal["nccl", "gloo"] = "nccl"
    """Communication backend for GPUs; CPU processes always use gloo."""
    batch_size_per_gpu: Annotated[int, Field(ge=1, strict=True)] = 8
    """Samples per forward pass of each GPU."""
    gradient_accumulation_steps: Annotated[int, Field(ge=1, strict=True)] = 1
    """Forward passes per optimizer step."""
    sync_batch_norm: _Switch = True
    """Synchronize batch norm, if the model has any."""
    mixed_precision: _Switch = True
    """Compute in bf16 or fp16, whichever the GPU has; False: fp32."""
    memory_fraction: Annotated[float, Field(gt=0, le=1, strict=True)] = 0.9
    """Share of each GPU's memory that may be used; a GPU with less free memory is not available."""

    @field_validator("gpu_ids")
    @classmethod
    def _check_unique(cls, value: list[int]) -> list[int]:
        if len(set(value)) != len(value):
            raise ValueError("gpu_ids must list each GPU once")
        return value

    def to_multi_gpu_config(self) -> MultiGPUConfig:
        """The section `parallel` of the configuration."""
        several = MultiGPUMode.DISTRIBUTED if self.distributed_training else MultiGPUMode.DATAPARALLEL
        return MultiGPUConfig(
            mode=several if self.use_multi_gpu else MultiGPUMode.NONE,
            device_ids=self.gpu_ids or None,
            backend=self.backend,
            sync_bn=self.sync_batch_norm,
            memory_fraction=self.memory_fraction,
        )

    def to_train_settings(self, gpus: int) -> dict[str, Any]:
        """Keys of the sections `train` and `model` for a run on that many GPUs."""
        return {
            "train.micro_batch_size": self.batch_size_per_gpu,
            "train.global_batch_size": self.batch_size_per_gpu * self.gradient_accumulation_steps * gpus,
            "model.precision": "auto" if self.mixed_precision else "fp32",
        }
