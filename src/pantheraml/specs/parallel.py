"""ParallelDims: the degree of each kind of parallelism."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from pantheraml.base.errors import ConfigError

Degree = Annotated[int, Field(ge=1)]

DIMENSIONS = ("pipeline", "replicate", "shard", "context", "tensor")
"""Outermost first. Neighboring ranks, which share a node, get the dimensions that communicate most."""


class ParallelDims(BaseModel):
    """Parallel degrees; their product is the world size."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pipeline: Degree = 1
    """Pipeline parallel: successive stages of layers."""
    replicate: Degree = 1
    """DDP: replicas of the weights, each with different samples."""
    shard: Degree = 1
    """FSDP2: shards of weights, gradients and optimizer states, each rank with different samples."""
    context: Degree = 1
    """Context parallel: shards of each sequence."""
    tensor: Degree = 1
    """Tensor parallel: shards of each weight matrix; all ranks see the same tokens."""

    @property
    def degrees(self) -> tuple[int, ...]:
        """Degrees in the order of DIMENSIONS."""
        return tuple(getattr(self, name) for name in DIMENSIONS)

    @property
    def world_size(self) -> int:
        return math.prod(self.degrees)

    @property
    def data(self) -> int:
        """Data parallel degree: number of parts of a global batch."""
        return self.replicate * self.shard

    @property
    def model_is_sharded(self) -> bool:
        """True if no process holds the whole model."""
        return max(self.pipeline, self.shard, self.tensor) > 1

    def check(self, world_size: int) -> None:
        """ConfigError unless the degrees use exactly `world_size` processes."""
        if self.world_size == world_size:
            return
        product = " x ".join(f"{name} {degree}" for name, degree in zip(DIMENSIONS, self.degrees, strict=True))
        raise ConfigError(
            f"The parallel degrees do not match the {world_size} process(es): {product} = {self.world_size}.",
            fix="Change parallel.pipeline, replicate, shard, context or tensor, or the number of processes (--nproc).",
        )

    def __str__(self) -> str:
        """Return the degrees above 1, such as `shard 2 x tensor 2`."""
        parts = [f"{name} {degree}" for name, degree in zip(DIMENSIONS, self.degrees, strict=True) if degree > 1]
        return " x ".join(parts) or "one process"
