"""What all ranks know of a step before it is taken, and what they decide on it.

Every rank computes the verdict from the same gathered numbers, so they cannot disagree; how is `policy`'s matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from torch import Tensor

from pantheraml.parallel.local import NamedParameters

Action = Literal["step", "retry", "zero", "skip", "roll_back", "stop"]
"""retry: run the step's passes once more; zero: take the step, with 0 in place of values that are not finite;
roll_back: skip it, and go on with the weights of an older checkpoint."""

Anomaly = Literal["overflow", "nonfinite", "spike", "jump", "left_out"]
"""overflow: by fp16's loss scale, as happens now and then; jump: of the gradient norm; left_out: some ranks' gradients
were not finite, and did not enter."""


@dataclass(frozen=True)
class StepNumbers:
    """What all ranks know about a step before it is taken; per-rank values are lists in rank order."""

    loss_sums: list[float]
    grad_norm: float
    target_tokens: int
    stop_requested: bool
    update_ratio: float | None = None
    """Norm of the last measured update over that of the weights; None if none was measured since the step before."""
    left_out: tuple[int, ...] = ()
    """Ranks whose gradient was not finite and did not enter."""

    # Each is asked for several times while a GPU waits for the decision.

    @cached_property
    def loss(self) -> float:
        return math.fsum(self.loss_sums) / max(1, self.target_tokens)

    @cached_property
    def bad_ranks(self) -> list[int]:
        return [rank for rank, value in enumerate(self.loss_sums) if not math.isfinite(value)]

    @property
    def gradients_finite(self) -> bool:
        """All ranks', also of those that were left out for it."""
        return math.isfinite(self.grad_norm) and not self.left_out

    @cached_property
    def finite(self) -> bool:
        return not self.bad_ranks and math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class Verdict:
    action: Action
    cause: str
    anomaly: Anomaly | None = None
    """What is wrong with the step; None if nothing is."""
    rate_factor: float = 1.0
    """What the schedule's learning rate is multiplied by, from this step on."""


class Suspect(NamedTuple):
    """The gradient that an anomaly shows in, as far as one process can tell."""

    size: float
    """Of its largest value; infinite if that is not finite."""
    number: int
    """Its place among the parameters of the process."""
    name: str


def suspect(parts: NamedParameters, anomaly: Anomaly | None) -> Suspect | None:
    """The first gradient of `parts` that is not finite or, where all are, the largest: the norm of finite values may be
    infinite, and a spike or a jump has one that is too large."""
    numbered = [
        (number, name, part.grad)
        for number, (name, part) in enumerate(parts)
        if part.grad is not None and part.grad.numel() > 0
    ]
    bad = next(((number, name) for number, name, gradient in numbered if not bool(gradient.isfinite().all())), None)
    if bad is not None:
        return Suspect(math.inf, *bad)
    if anomaly not in ("nonfinite", "spike", "jump") or not numbered:
        return None
    return max(Suspect(float(gradient.abs().max()), number, name) for number, name, gradient in numbered)


def first_nonfinite(named: Sequence[tuple[str, Tensor]]) -> str | None:
    """The first tensor (in model order) that holds NaN or infinity, by name."""
    return next((name for name, tensor in named if not bool(tensor.isfinite().all())), None)
