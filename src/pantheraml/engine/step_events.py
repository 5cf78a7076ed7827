"""What is told of the steps of a run: the `train.step` events, and what lies between two of them.

A step is not told of as soon as it is taken, because a GPU would wait for that, but when the next one is under way, and
before anything else that is told or kept of the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pantheraml.base.events import Emit
from pantheraml.engine.step_report import StepReport


@dataclass
class _Work:
    """What was done since the last `train.step` event."""

    tokens: int = 0
    target_tokens: int = 0
    seconds: float = 0.0

    last: tuple[int, StepReport, float] | None = None
    """The newest step that no event has told of, and its learning rate."""
    is_due: bool = False
    """An event is to tell of it."""


class StepEvents:
    def __init__(self, emit: Emit, *, every: int, batch: int, samples: int, last: int | None, ranks: bool) -> None:
        """Tells of each `every`-th step; with `ranks`, of each rank's part in it, too. A step takes `batch` of the
        `samples` that an epoch has, but none after the `last`-th."""
        self._emit, self._every, self._ranks = emit, every, ranks
        self._batch, self._samples, self._last = batch, samples, last
        self._untold = _Work()

    def count(self, step: int, report: StepReport, rate: float, seconds: float) -> None:
        """`step` was taken (or skipped), with the learning rate `rate`."""
        work = self._untold
        work.tokens += report.tokens
        work.target_tokens += report.numbers.target_tokens
        work.seconds += seconds
        work.last = step, report, rate
        work.is_due = step % self._every == 0

    def tell(self) -> None:
        """Of the last step, if that is due."""
        if self._untold.is_due:
            self.tell_rest()

    def tell_rest(self) -> None:
        """Of the last step, unless that was told of. Tokens and seconds are those since the last event; loss and
        gradient norm are the last step's."""
        work, self._untold = self._untold, _Work()
        if work.last is None:
            return
        step, report, rate = work.last
        taken = step * self._batch
        self._emit(
            "train.step",
            step=step,
            epoch=(taken if self._last is None else min(taken, self._last)) / self._samples,
            loss=report.numbers.loss,
            learning_rate=rate,
            grad_norm=report.numbers.grad_norm,
            tokens=work.tokens,
            target_tokens=work.target_tokens,
            seconds=work.seconds,
            tokens_per_second=work.tokens / work.seconds,
            memory_bytes=report.memory_bytes,
            update_ratio=report.numbers.update_ratio,
            **({} if report.aux_loss is None else {"aux_loss": report.aux_loss}),
        )
        if self._ranks and len(report.rank_tokens) > 1:
            self._emit(
                "train.ranks",
                step=step,
                tokens=report.rank_tokens,
                seconds=report.rank_seconds if any(report.rank_seconds) else None,
                memory_bytes=report.rank_memory_bytes,
            )

    @contextmanager
    def told(self) -> Iterator[None]:
        """However the steps inside end, nothing that is due is left untold."""
        try:
            yield
        finally:
            self.tell()
