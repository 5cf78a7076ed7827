"""How large an update is, against the weights it changes: a learning rate that is too high shows there first.

It is measured around a step of the optimizer and read with the next step's numbers, so the host waits for it no longer
than for those.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pantheraml.engine.guard.norms import Spread

NOT_MEASURED = (0.0, 0.0)


class UpdateRatio:
    def __init__(self, every: int, spread: Spread) -> None:
        """Measures each `every`-th step; 0 = none."""
        self._every, self._spread = every, spread
        self._steps = 0
        self._measured: tuple[Tensor, Tensor] | None = None

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Around a step of the optimizer."""
        self._steps += 1
        if self._every == 0 or self._steps % self._every:
            yield
            return
        parts = [part.detach() for _, part in self._spread.parts]
        updates = torch._foreach_neg(parts)
        yield
        torch._foreach_add_(updates, parts)
        self._measured = (self._spread.share(updates), self._spread.share(parts))

    def take(self) -> tuple[float, float]:
        """This rank's shares of the squared norms of the last update and of the weights; once for each measurement."""
        if self._measured is None:
            return NOT_MEASURED
        update, weights = self._measured
        self._measured = None
        return float(update), float(weights)
