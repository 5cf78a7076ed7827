"""Assign the samples of a global batch to data-parallel ranks.

Shares are contiguous, in rank order, and cover every sample once. The samples of a step are chosen elsewhere; this
module only decides who computes them. It is pure arithmetic on values identical on all ranks, exact where rounding
could differ, so ranks agree without communication. Shares are even, set by hand (sizes per GPU), or follow measured
throughput (`AdaptiveShares`). The loss is weighted by tokens, so the result is the same in all cases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

SMOOTHING = 0.5
"""Weight of the newest window in the exponential moving average."""

FLOOR = 0.25
"""Minimum weight of a rank as a fraction of an even share: a rank without samples would never be measured again."""


def weighted_shares(count: int, weights: Sequence[float]) -> list[int]:
    """Apportion `count` samples by `weights` with the largest-remainder method; ties go to the lower rank.

    Integer weights that sum to `count` are returned as they are.
    """
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    assert total > 0, "some rank must have weight"
    quotas = [weight * count / total for weight in exact]
    shares = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(shares)), key=lambda rank: (shares[rank] - quotas[rank], rank))
    for rank in by_remainder[: count - sum(shares)]:
        shares[rank] += 1
    return shares


def even_shares(count: int, ranks: int) -> list[int]:
    """Return shares that differ by at most one."""
    return weighted_shares(count, [1] * ranks)


def split(ids: Ids, shares: Sequence[int]) -> list[Ids]:
    """Split sample ids into one array per rank."""
    assert sum(shares) == len(ids), "shares cover the batch"
    return np.split(ids, np.cumsum(shares)[:-1])


def shards(ids: Ids, ranks: int, *, micro_batch: int, weights: Sequence[float] | None = None) -> list[list[Ids]]:
    """Return every rank's micro-batches of a global batch; even shares without `weights`.

    A rank may get none (short last batch) and must still join the step's collectives.
    """
    shares = even_shares(len(ids), ranks) if weights is None else weighted_shares(len(ids), weights)
    assert len(shares) == ranks, "one weight per rank"
    return [
        [mine[start : start + micro_batch] for start in range(0, len(mine), micro_batch)] for mine in split(ids, shares)
    ]


class _Schedule(NamedTuple):
    """Current weights, and those that apply from step `change_at` on."""

    now: tuple[float, ...]
    change_at: int
    then: tuple[float, ...]


class AdaptiveShares:
    """Batch shares that follow the measured tokens per second of each rank.

    Every rank feeds it the same gathered numbers, so all hold the same weights. Measurements are summed over a window
    of steps, smoothed across windows, and bounded below. New weights apply from the step after next: while step k runs,
    the batches of k + 1 are already being prefetched with `weights_at(k + 1)`.
    """

    def __init__(self, ranks: int, *, global_batch: int, window: int = 10) -> None:
        self._window = window
        self._floor = min(max(FLOOR / ranks, 1 / global_batch), 1 / ranks)
        even = (1 / ranks,) * ranks
        self._schedule = _Schedule(even, 0, even)
        self._speeds: list[float | None] = [None] * ranks
        self._tokens = [0.0] * ranks
        self._seconds = [0.0] * ranks

    def weights_at(self, step: int) -> tuple[float, ...]:
        """Return the weights for `step`. Safe to call from another thread: `observe` swaps the schedule atomically."""
        schedule = self._schedule
        return schedule.then if step >= schedule.change_at else schedule.now

    def observe(self, step: int, tokens: Sequence[float], seconds: Sequence[float]) -> None:
        """Record each rank's tokens and compute seconds at `step`, excluding time spent waiting for other ranks."""
        ranks = len(self._speeds)
        assert len(tokens) == len(seconds) == ranks, "one number per rank"
        for rank in range(ranks):
            if tokens[rank] > 0 and seconds[rank] > 0:
                self._tokens[rank] += tokens[rank]
                self._seconds[rank] += seconds[rank]
        if (step + 1) % self._window == 0:
            self._close_window(step)

    def _close_window(self, step: int) -> None:
        for rank, (tokens, seconds) in enumerate(zip(self._tokens, self._seconds, strict=True)):
            if seconds > 0:
                before, measured = self._speeds[rank], tokens / seconds
                self._speeds[rank] = measured if before is None else before + SMOOTHING * (measured - before)
        self._tokens = [0.0] * len(self._speeds)
        self._seconds = [0.0] * len(self._speeds)
        speeds = [speed for speed in self._speeds if speed is not None]
        if len(speeds) == len(self._speeds):  # keep the weights until every rank was measured
            total = math.fsum(speeds)
            weights = _at_least([speed / total for speed in speeds], self._floor)
            self._schedule = _Schedule(self.weights_at(step + 1), step + 2, tuple(weights))

    def to_state(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {
            "now": list(self._schedule.now),
            "change_at": self._schedule.change_at,
            "then": list(self._schedule.then),
            "speeds": list(self._speeds),
            "tokens": list(self._tokens),
            "seconds": list(self._seconds),
        }

    def from_state(self, state: Mapping[str, Any]) -> None:
        """Restore `to_state`. Ignored if the number of ranks changed: weights stay even until new measurements."""
        if len(state["speeds"]) != len(self._speeds):
            return
        self._schedule = _Schedule(tuple(state["now"]), int(state["change_at"]), tuple(state["then"]))
        self._speeds = list(state["speeds"])
        self._tokens, self._seconds = list(state["tokens"]), list(state["seconds"])


def _at_least(shares: Sequence[float], floor: float) -> list[float]:
    """Raise shares below `floor` to it and scale down the others, so that they still sum to 1."""
    raised: set[int] = set()
    while True:
        unraised = math.fsum(share for rank, share in enumerate(shares) if rank not in raised)
        left = 1 - floor * len(raised)
        result = [floor if rank in raised else share * left / unraised for rank, share in enumerate(shares)]
        low = {rank for rank, share in enumerate(result) if share < floor} - raised
        if not low or len(raised | low) == len(shares):
            return result
        raised |= low
