"""Memory that is left on the GPUs of a run: compared with the plan after two steps, and watched for its end.

A step that runs out of memory is retried, or the processes restart, but both take time, and a GPU that somebody else
fills may fail in between. So where the memory that is left falls towards zero, smaller micro-batches are taken before
it ends. All ranks see the same numbers, and so decide the same.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

import torch

from pantheraml.base.events import MemoryMeasured
from pantheraml.specs.plan import Plan

READ_EVERY = 8
"""Steps between two readings: asking the driver takes some ten microseconds."""
WINDOW, FEWEST = 8, 4
"""Readings that make a trend, at most and at least."""
NEAR = 0.1
"""Share of the memory; as long as more is left, nothing is done."""
LEAST_FALL = 0.002
"""Share by which it must have fallen within the window."""
HORIZON = 64
"""Steps; an end that is farther away may never come."""
COMPARED_AFTER = 2
"""Steps after which memory is compared with the plan: the second has the optimizer's states."""


def share_left(device: torch.device, fraction: float | None) -> float:
    """Share of the device's memory that is left when a step is at its peak; infinite on a CPU.

    `fraction`: share of it that this process may use; None: all.
    """
    if device.type != "cuda":
        return math.inf
    free, total = torch.cuda.mem_get_info(device)
    available = free + torch.cuda.memory_reserved(device)
    limit = available if fraction is None else min(available, fraction * total)
    return float((limit - torch.cuda.max_memory_allocated(device)) / total)


class Headroom:
    """Reads what is left on this rank's device, at every READ_EVERY-th call."""

    def __init__(self, device: torch.device, fraction: float | None) -> None:
        self._device, self._fraction, self._calls = device, fraction, 0

    def read(self) -> float:
        """Infinite: not read now."""
        self._calls += 1
        return share_left(self._device, self._fraction) if self._calls % READ_EVERY == 0 else math.inf


class MemoryTrend:
    """When memory ends, if it goes on falling as it did."""

    def __init__(self) -> None:
        self._readings: deque[tuple[int, float]] = deque(maxlen=WINDOW)

    def add(self, step: int, left: float) -> int | None:
        """Add the share that was left in a step; return the steps to its end if that is near, and start anew."""
        if math.isinf(left):
            return None
        self._readings.append((step, left))
        if left > NEAR or len(self._readings) < FEWEST or self._readings[0][1] - left < LEAST_FALL:
            return None
        steps, shares = zip(*self._readings, strict=True)
        slope = statistics.linear_regression(steps, shares).slope
        if slope >= 0 or left > -slope * HORIZON:
            return None
        self._readings.clear()
        return max(0, math.floor(left / -slope))


def forget_peak(device: torch.device) -> None:
    """Let the next readings see what a step needs from now on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def compare_with_plan(plan: Plan, device: torch.device, *, step: int, allocated: int) -> MemoryMeasured | None:
    """Measured and predicted memory. `allocated`: of the rank that uses most. None: the run is on a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    predicted = None if plan.prediction is None else plan.prediction.memory
    return MemoryMeasured(
        step=step,
        allocated_bytes=allocated,
        reserved_bytes=torch.cuda.max_memory_reserved(device),
        device_bytes=total - free,
        capacity_bytes=total,
        predicted_bytes=None if predicted is None else predicted.allocated_bytes,
        predicted_device_bytes=None if predicted is None else predicted.device_bytes,
    )
