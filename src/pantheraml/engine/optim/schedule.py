"""Learning rate schedule, as a pure function of the step."""

from __future__ import annotations

import math

from pantheraml.specs.train import TrainSettings


def learning_rate(settings: TrainSettings, step: int, total_steps: int) -> float:
    """Learning rate of `step` (from 0): linear warmup, then decay to the floor at the end of the run."""
    peak, warmup = settings.peak_learning_rate, settings.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if settings.schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    shape = (1 - progress) if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    floor = settings.min_learning_rate_ratio
    return peak * (floor + (1 - floor) * shape)
