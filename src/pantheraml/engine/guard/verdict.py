"""What all ranks know of a step before it is taken, and what they decide on it.

Every rank computes the verdict from the same gathered numbers, so they cannot disagree; how is `policy`'s matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Action = Literal["step", "zero", "skip", "stop"]
"""zero: take the step, with 0 in place of gradient values that are not finite."""

Anomaly = Literal["overflow", "nonfinite", "spike"]
"""overflow: of fp16's loss scale, which is in order now and then."""


@dataclass(frozen=True)
class StepNumbers:
    """What all ranks know about a step before it is taken; per-rank values are lists in rank order."""

    loss_sums: list[float]
    grad_norm: float
    target_tokens: int
    stop_requested: bool
    update_ratio: float | None = None
    """Norm of the last measured update over that of the weights; None if none was measured since the step before."""

    @property
    def loss(self) -> float:
        return math.fsum(self.loss_sums) / max(1, self.target_tokens)

    @property
    def bad_ranks(self) -> list[int]:
        return [rank for rank, value in enumerate(self.loss_sums) if not math.isfinite(value)]

    @property
    def finite(self) -> bool:
        return not self.bad_ranks and math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class Verdict:
    action: Action
    cause: str
    anomaly: Anomaly | None = None
    """What is wrong with the step; None if nothing is."""


def first_nonfinite(named: list[tuple[str, Tensor]]) -> str | None:
    """The first tensor (in model order) that holds NaN or infinity, by name."""
    return next((name for name, tensor in named if not bool(tensor.isfinite().all())), None)
