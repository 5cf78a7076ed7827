"""Predictions of a plan: memory, time, cost and energy of a run, and the plans that were not chosen.

None: not known. Nothing here is a guess; `sources` says which rates the figures come from.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from pantheraml.specs.frozen_model import FrozenModel


class MemoryPrediction(FrozenModel):
    """Peak memory of the rank that needs most, in bytes."""

    parts: dict[str, int]
    """Bytes by role at the peak: weights, adapters, gradients, optimizer, activations, logits, ...; sum:
    allocated_bytes."""
    instant: str | None = None
    """Moment of a step at which the peak occurs, such as `loss`."""
    allocated_bytes: int
    """As torch.cuda.max_memory_allocated."""
    reserved_bytes: int | None
    """As torch.cuda.max_memory_reserved; None: predicted by an older version."""
    device_bytes: int | None
    """As the driver counts: reserved, CUDA context, communication buffers, at most. Out of memory follows this one."""
    capacity_bytes: int | None
    """Memory of the device that the run may use."""

    @property
    def fits(self) -> bool | None:
        if self.device_bytes is None or self.capacity_bytes is None:
            return None
        return self.device_bytes <= self.capacity_bytes


class Prediction(FrozenModel):
    """Predicted memory, time, cost and energy of a run."""

    memory: MemoryPrediction | None
    step_seconds: float | None
    total_seconds: float | None
    """Seconds to the end of the run; None if its number of steps or the time of a step is not known."""
    energy_kwh: float | None
    dollars: float | None
    steps: int | None = None
    time_parts: dict[str, float] = Field(default_factory=dict)
    """Seconds of a step by role: matmul, attention, memory, communication, bubble, launch, optimizer."""
    sources: tuple[str, ...] = ()
    """Which rates were used, and what is not known."""


class Alternative(FrozenModel):
    """A plan that was not chosen."""

    name: str
    changes: dict[str, Any]
    """Settings that lead to it, by their keys in the configuration."""
    fits: bool | None
    step_seconds: float | None
    memory: MemoryPrediction | None
    limited_by: str | None
    """memory, compute, bandwidth, communication, bubble or launch (the host); None: not known."""
    reason: str
    """Why it was not chosen."""
