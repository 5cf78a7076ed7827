"""Setting: everything that determines memory and time of a training step, besides the model and the hardware.

A plan decides these for a run; `plan` compares many of them. Predictions read only this, so that a candidate needs no
configuration of its own: `setting.model_copy(update={"micro_batch": 2})`.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from pantheraml.specs.frozen_model import FrozenModel
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.plan import Plan
from pantheraml.specs.train import Checkpointing, TrainConfig

Method = Literal["full", "lora", "dora"]
Optimizer = Literal["adamw", "adamw_bf16", "adamw8bit"]


class Setting(FrozenModel):
    """The work of a process in a step. Sizes are per process unless noted."""

    device: Literal["cpu", "cuda"] = "cuda"
    method: Method = "lora"
    """qlora is lora with frozen_weights="nf4"."""
    lora_rank: int = Field(default=16, ge=1)
    lora_targets: str | tuple[str, ...] = "all-linear"
    lora_dropout: float = 0.0
    trained_weights: Literal["fp32", "bf16"] = "fp32"
    """Dtype of a full fine-tune's weights and gradients; adapters are always fp32."""
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Compute dtype."""
    frozen_weights: Literal["fp8", "int8", "nf4"] | None = None
    fp8_matmuls: bool = False
    fused: bool = False
    cuda_graph: bool = False
    """Capture a whole step as a CUDA graph."""
    compile: bool = False
    activation_checkpointing: Checkpointing = "none"
    optimizer: Optimizer = "adamw"
    max_grad_norm: float = 1.0
    dims: ParallelDims = ParallelDims()
    stages_per_process: int = Field(default=1, ge=1)
    """Pipeline stages of a process."""
    bucket_cap_mb: int = Field(default=25, ge=1)
    gradient_as_bucket_view: bool = True
    micro_batch: int = Field(default=1, ge=1)
    """Sequences of a forward pass."""
    accumulation: int = Field(default=1, ge=1)
    """Forward passes of a step."""
    seq_len: int = Field(default=2048, ge=1)
    """Tokens of a full sequence, over all context parallel ranks."""
    packed: bool = True
    devices_per_process: int = Field(default=1, ge=1)
    """More than 1: one process that splits or replicates the model on its devices."""

    @property
    def tokens(self) -> int:
        """Tokens of a forward pass of this process, padding included."""
        return self.micro_batch * -(-self.seq_len // self.dims.context)


def setting_of(config: TrainConfig, plan: Plan) -> Setting:
    """The setting of a planned run."""
    share = math.ceil(plan.global_batch_size / plan.dims.data)
    targets = config.method.target_modules
    return Setting(
        device=plan.device,
        method="lora" if config.method.kind == "qlora" else config.method.kind,
        lora_rank=config.method.rank,
        lora_targets=targets if isinstance(targets, str) else tuple(targets),
        lora_dropout=config.method.dropout,
        trained_weights=config.train.weights,
        precision=plan.precision,
        frozen_weights=plan.frozen_weights,
        fp8_matmuls=plan.fp8_matmuls,
        fused=plan.fused,
        cuda_graph=plan.cuda_graph,
        compile=plan.compile,
        activation_checkpointing=plan.activation_checkpointing,
        optimizer=config.train.optimizer,
        max_grad_norm=config.train.max_grad_norm,
        dims=plan.dims,
        stages_per_process=config.parallel.stages_per_process,
        bucket_cap_mb=config.parallel.bucket_cap_mb,
        gradient_as_bucket_view=config.parallel.gradient_as_bucket_view,
        micro_batch=plan.micro_batch_size,
        accumulation=math.ceil(share / plan.micro_batch_size),
        seq_len=config.data.seq_len,
        packed=config.data.packing,
        devices_per_process=len(plan.device_ids) if plan.copies or plan.split is not None else 1,
    )
