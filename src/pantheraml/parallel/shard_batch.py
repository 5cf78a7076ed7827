"""Which rank computes which samples of a global batch.

Shares are contiguous, in rank order, and cover every sample once: the samples of step k are fixed elsewhere, and only
who computes them is decided here. All of it is pure arithmetic on numbers that every rank holds alike, exact where
rounding could differ, so that ranks need not talk to agree. Shares are even, by hand (sizes per GPU), or follow
measured throughput (`Adaptive`); in all cases the loss is weighted by tokens, so the result is the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pantheraml.base.errors import ConfigError

Ids = npt.NDArray[np.int64]

SMOOTHING = 0.5
"""What the newest window of measurements counts for against all before it."""

FLOOR = 0.25
"""Least weight of a rank, as a part of an even share: one that gets nothing would never be measured again."""


def weighted_shares(count: int, weights: Sequence[float]) -> list[int]:
    """`count` samples in proportion to `weights`, by largest remainders (of equal ones, the lower rank's first).

    Weights that add up to `count` are the shares themselves.
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
    """Shares that differ by at most one."""
    return weighted_shares(count, [1] * ranks)


def check_weights(weights: Sequence[float], ranks: int) -> None:
    """ConfigError unless a batch can be shared among `ranks` ranks by `weights` that somebody wrote."""
    if len(weights) != ranks or min(weights) < 0 or sum(weights) == 0:
        raise ConfigError(
            f"{','.join(map(str, weights))} are not batch sizes for {ranks} rank(s).",
            todo="Give one number for each rank, such as 2,2,2,15: none below 0, and not all 0.",
        )


def split(ids: Ids, shares: Sequence[int]) -> list[Ids]:
    """Every rank's samples."""
    assert sum(shares) == len(ids), "shares cover the batch"
    return np.split(ids, np.cumsum(shares)[:-1])


def shards(ids: Ids, ranks: int, *, micro_batch: int, weights: Sequence[float] | None = None) -> list[list[Ids]]:
    """Every rank's micro-batches of a global batch; even shares without `weights`.

    A rank may get none (a short last batch); the caller still has to take part in the gradient exchange.
    """
    shares = even_shares(len(ids), ranks) if weights is None else weighted_shares(len(ids), weights)
    assert len(shares) == ranks, "one weight per rank"
    return [
        [mine[start : start + micro_batch] for start in range(0, len(mine), micro_batch)] for mine in split(ids, shares)
    ]


class _Schedule(NamedTuple):
    """Weights now, and those that follow from step `change_at` on."""

    now: tuple[float, ...]
    change_at: int
    then: tuple[float, ...]


class Adaptive:
    """Weights that follow the measured tokens per second of each rank.

    Every rank feeds it the same gathered numbers and so holds the same weights. Measurements are summed over a window
    of steps, smoothed from window to window, and bounded below. New weights hold from the step after next: while step
    k runs, the batches of k + 1 are being read already, with the weights that `weights_at(k + 1)` gave.
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
        """May be called from another thread than `observe`: the schedule is replaced as a whole."""
        schedule = self._schedule
        return schedule.then if step >= schedule.change_at else schedule.now

    def observe(self, step: int, tokens: Sequence[float], seconds: Sequence[float]) -> None:
        """What each rank computed at `step`, and how long that took it, waiting for others excluded."""
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
        if len(speeds) == len(self._speeds):  # a rank that was never measured says nothing about its share
            total = math.fsum(speeds)
            weights = _at_least([speed / total for speed in speeds], self._floor)
            self._schedule = _Schedule(self.weights_at(step + 1), step + 2, tuple(weights))

    def to_state(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {
            "now": list(self._schedule.now),
            "change_at": self._schedule.change_at,
            "then": list(self._schedule.then),
            "speeds": list(self._speeds),
            "tokens": list(self._tokens),
            "seconds": list(self._seconds),
        }

    def from_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `to_state` was taken. What was measured on another number of ranks says nothing about these:
        then the weights stay even until there are new measurements."""
        if len(state["speeds"]) != len(self._speeds):
            return
        self._schedule = _Schedule(tuple(state["now"]), int(state["change_at"]), tuple(state["then"]))
        self._speeds = list(state["speeds"])
        self._tokens, self._seconds = list(state["tokens"]), list(state["seconds"])


def _at_least(shares: Sequence[float], floor: float) -> list[float]:
    """Shares of 1, none below `floor`: those that are get it, and the others give in proportion."""
    raised: set[int] = set()
    while True:
        kept = math.fsum(share for rank, share in enumerate(shares) if rank not in raised)
        left = 1 - floor * len(raised)
        result = [floor if rank in raised else share * left / kept for rank, share in enumerate(shares)]
        low = {rank for rank, share in enumerate(result) if share < floor} - raised
        if not low or len(raised | low) == len(shares):
            return result
        raised |= low
