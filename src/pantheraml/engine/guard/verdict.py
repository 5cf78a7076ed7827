"""After backward and before the step, all ranks take one decision: step, skip, or stop.

Every rank computes the verdict from the same gathered numbers, so they cannot disagree. A run whose loss or gradient is
not finite never steps on it, and never ends as a success: it skips a bounded number of steps in a row, or stops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from pantheraml.specs.train import StabilityConfig

Action = Literal["step", "skip", "stop"]


@dataclass(frozen=True)
class StepNumbers:
    """What all ranks know about a step before it is taken; per-rank values are lists in rank order."""

    loss_sums: list[float]
    grad_norm: float
    target_tokens: int
    stop_requested: bool

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


def decide(
    numbers: StepNumbers, policy: StabilityConfig, *, skipped_in_a_row: int, loss_scale: float | None
) -> Verdict:
    """`loss_scale` is the current fp16 loss scale, or None without loss scaling."""
    if numbers.finite:
        return Verdict("step", "loss and gradient are finite")
    if numbers.bad_ranks:
        cause = f"the loss is not finite on rank {', '.join(map(str, numbers.bad_ranks))}"
    else:
        cause = f"the gradient norm is {numbers.grad_norm}"
        if loss_scale is not None and loss_scale > 1.0:
            return Verdict("skip", f"fp16 overflow at loss scale {loss_scale:g}; the scale is lowered")
    if policy.on_nonfinite == "stop":
        return Verdict("stop", cause)
    if skipped_in_a_row >= policy.max_skipped_steps:
        return Verdict("stop", f"{cause}, after {skipped_in_a_row} skipped step(s) in a row")
    return Verdict("skip", cause)


def first_nonfinite(named: list[tuple[str, Tensor]]) -> str | None:
    """The first tensor (in model order) that holds NaN or infinity, by name."""
    return next((name for name, tensor in named if not bool(tensor.isfinite().all())), None)
