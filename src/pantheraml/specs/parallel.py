"""ParallelDims: how many ways each thing is divided over the processes of a run."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from pantheraml.base.errors import ConfigError

Degree = Annotated[int, Field(ge=1)]

DIMENSIONS = ("pipeline", "replicate", "shard", "context", "tensor")
"""Slowest first. Neighbouring ranks, which are on one machine, get what talks most."""


class ParallelDims(BaseModel):
    """Every process has one place in each dimension; the product of all degrees is the number of processes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pipeline: Degree = 1
    """Stages: groups of layers, one after another."""
    replicate: Degree = 1
    """Copies of the weights (DDP); each sees other samples."""
    shard: Degree = 1
    """Parts that weights, gradients and optimizer state are cut into (FSDP2); each sees other samples."""
    context: Degree = 1
    """Parts that every sequence is cut into."""
    tensor: Degree = 1
    """Parts that each weight matrix is cut into; all see the same tokens."""

    @property
    def degrees(self) -> tuple[int, ...]:
        """In the order of DIMENSIONS."""
        return tuple(getattr(self, name) for name in DIMENSIONS)

    @property
    def world_size(self) -> int:
        return math.prod(self.degrees)

    @property
    def data(self) -> int:
        """How many shares a global batch is split into."""
        return self.replicate * self.shard

    @property
    def model_copies_apart(self) -> bool:
        """Whether some process does not hold the whole model."""
        return max(self.pipeline, self.shard, self.tensor) > 1

    def check(self, world_size: int) -> None:
        """ConfigError unless this is a way to use just `world_size` processes."""
        if self.world_size == world_size:
            return
        product = " x ".join(f"{name} {degree}" for name, degree in zip(DIMENSIONS, self.degrees, strict=True))
        raise ConfigError(
            f"The degrees of parallelism do not fit the {world_size} process(es): {product} = {self.world_size}.",
            todo="Change parallel.pipeline, replicate, shard, context or tensor, or the number of processes (--nproc).",
        )

    def __str__(self) -> str:
        """As people say it: `shard 2 x tensor 2`."""
        named = [f"{name} {degree}" for name, degree in zip(DIMENSIONS, self.degrees, strict=True) if degree > 1]
        return " x ".join(named) or "one process"
