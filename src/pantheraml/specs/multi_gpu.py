"""MultiGPUConfig: how the work is spread over processes and devices (section `parallel` of a TrainConfig)."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass


class MultiGPUMode(StrEnum):
    """Values are what YAML, flags and REST write."""

    NONE = "none"
    DISTRIBUTED = "distributed"
    AUTO = "auto"


@dataclass(config=ConfigDict(extra="forbid", use_attribute_docstrings=True), kw_only=True)
class MultiGPUConfig:
    mode: MultiGPUMode = MultiGPUMode.AUTO
    """none: one process; distributed: one process per device (DDP); auto: distributed when there is more than one."""
    world_size: Annotated[int, Field(ge=1)] | None = None
    """Number of processes; None = one per visible GPU, or one on a machine without GPUs."""
    device_ids: list[Annotated[int, Field(ge=0)]] | None = None
    """GPU indices to use, as `pantheraml gpus` numbers them; None = all visible ones."""
    backend: Literal["nccl", "gloo"] = "nccl"
    """Communication between GPUs; processes on CPUs always use gloo."""
    find_unused_parameters: bool = False
    """DDP looks for parameters that a step did not use (slower); needed only when some are skipped."""
    gradient_as_bucket_view: bool = True
    """Gradients share memory with DDP's communication buckets."""
    broadcast_buffers: bool = True
    """DDP sends rank 0's buffers to all ranks before each forward pass."""
    bucket_cap_mb: Annotated[int, Field(ge=1)] = 25
    """Size of a DDP communication bucket in MiB."""
    timeout_seconds: Annotated[int, Field(ge=1)] = 300
    """How long a rank waits for its peers before the run stops with an error."""
    grace_seconds: Annotated[int, Field(ge=1)] = 120
    """How long workers may take to save after Ctrl-C or SIGTERM before they are killed."""
