"""Mean and spread of the recent values of a number that every step brings, and how far a new value lies above them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

LEAST_SPREAD = 0.01
"""Of the mean. A number that has hardly moved would make a spike of its own noise."""


class MovingStatistics:
    """Over the first `warmup` values the plain mean and variance, from then on exponentially weighted ones."""

    def __init__(self, *, decay: float, warmup: int) -> None:
        self._decay, self._warmup = decay, warmup
        self._count, self.mean, self._variance = 0, 0.0, 0.0

    @property
    def ready(self) -> bool:
        return self._count >= self._warmup

    @property
    def spread(self) -> float:
        """The standard deviation, or the least that is taken for one."""
        return max(math.sqrt(self._variance), LEAST_SPREAD * abs(self.mean))

    def score(self, value: float) -> float:
        """How many standard deviations `value` lies above the mean; 0 as long as too little is known."""
        if not self.ready:
            return 0.0
        above = value - self.mean
        if self.spread == 0.0:
            return math.inf if above > 0 else 0.0
        return above / self.spread

    def limit(self, score: float) -> float:
        """The value of that score; infinite as long as too little is known."""
        return self.mean + score * self.spread if self.ready else math.inf

    def add(self, value: float) -> None:
        self._count += 1
        keep = self._decay if self._count > self._warmup else 1 - 1 / self._count
        before = value - self.mean
        self.mean += (1 - keep) * before
        self._variance = keep * (self._variance + (1 - keep) * before**2)

    def to_state(self) -> dict[str, Any]:
        return {"count": self._count, "mean": self.mean, "variance": self._variance}

    def from_state(self, state: Mapping[str, Any]) -> None:
        self._count, self.mean, self._variance = state["count"], state["mean"], state["variance"]
