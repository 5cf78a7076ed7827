"""Where the loss of a run is going, from the first step to the last.

A loss is compared with its recent values only once there are enough of them. Until then, and at the end, there are two
marks that every run has: its first loss, and ln V, the loss of guessing uniformly among V tokens. A run may begin above
ln V, and batches of few tokens scatter; but none that learns goes far above both, or ends there.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

DIVERGED = 1.5
"""Times the largest of the losses so far and ln V."""
RECENT = 10
"""Losses whose median is the final one; of a short run the last quarter."""
FIRST = 5
"""Losses of which the largest is what a run began with, for batches differ; none after it diverged."""
ABOVE, ABOVE_BY = 1.25, 0.1
"""Times that loss, and how far beyond it: what the final one has to be above."""
NEAR = 0.03
"""Of ln V: how near to it is at it."""
ENOUGH_STEPS = 20
"""Before that many, a model that is trained from scratch may still be guessing."""


class LossTrend:
    def __init__(self, vocabulary: int | None = None) -> None:
        """`vocabulary`: how many tokens there are to guess among; None: not known, and then little can be said."""
        self._vocabulary = vocabulary
        self._first: float | None = None
        self._begun, self._peak, self._count, self._diverged = 0.0, 0.0, 0, False
        self._recent: deque[float] = deque(maxlen=RECENT)

    @property
    def _guess(self) -> float:
        return math.log(self._vocabulary) if self._vocabulary else math.inf

    @property
    def bound(self) -> float:
        """No loss of a run that learns is above it."""
        return math.inf if self._first is None else DIVERGED * max(self._peak, self._guess)

    def cause(self, loss: float) -> str | None:
        """What to say of a loss that is above the bound."""
        if loss <= self.bound:
            return None
        return (
            f"the loss {loss:.4g} is far above that of the first step ({self._first:.4g}) and of a uniform guess"
            f" ({self._guess:.4g})"
        )

    def add(self, loss: float, *, taken: bool) -> None:
        """`taken`: the step was, so that the next losses are to be compared with this one."""
        if loss > self.bound:
            self._diverged = True
        if self._count < FIRST and not self._diverged:
            self._begun = max(self._begun, loss)
        self._first = loss if self._first is None else self._first
        if taken:
            self._peak = max(self._peak, loss)
        self._count += 1
        self._recent.append(loss)

    def concern(self) -> str | None:
        """What to say at the end of a run whose loss is no better than at its beginning; None: nothing."""
        if self._first is None or self._count < 2 or not (self._diverged or self._count >= RECENT):
            return None
        final = statistics.median(list(self._recent)[-max(1, self._count // 4) :])
        lower = "a lower train.learning_rate may help"
        stuck = self._count >= ENOUGH_STEPS and final > (1 - NEAR) * self._begun
        if abs(final / self._guess - 1) <= NEAR and (self._diverged or stuck):
            todo = lower if self._diverged else "a higher train.learning_rate, or more steps, may help"
            return (
                f"the loss ended at {final:.4g}, that of a uniform guess among {self._vocabulary} tokens"
                f" ({self._guess:.4g}), and began at {self._first:.4g}; {todo}"
            )
        if final > max(ABOVE * self._begun, self._begun + ABOVE_BY):
            return f"the loss ended at {final:.4g}, above the {self._begun:.4g} that it began at; {lower}"
        return None

    def to_state(self) -> dict[str, Any]:
        return {
            "first": self._first,
            "begun": self._begun,
            "peak": self._peak,
            "count": self._count,
            "diverged": self._diverged,
            "recent": list(self._recent),
        }

    def from_state(self, state: Mapping[str, Any]) -> None:
        self._first, self._begun = state["first"], state["begun"]
        self._peak, self._count = state["peak"], state["count"]
        self._diverged, self._recent = state["diverged"], deque(state["recent"], maxlen=RECENT)
