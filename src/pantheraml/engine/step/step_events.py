"""The `train.step` and `train.ranks` events.

The GPU would wait if a step were logged right after it, so its event is emitted while the next step runs, and before
any other event or checkpoint of the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pantheraml.base.events import Emit, TrainRanks, TrainStep
from pantheraml.engine.step.step_report import StepReport


@dataclass
class _PendingSteps:
    """Totals since the last `train.step` event."""

    tokens: int = 0
    target_tokens: int = 0
    seconds: float = 0.0

    last: tuple[int, StepReport, float] | None = None
    """Latest step without an event, and its learning rate."""
    is_due: bool = False
    """Whether that step is to be logged."""


class StepEvents:
    def __init__(self, emit: Emit, *, every: int, batch: int, samples: int, last: int | None, ranks: bool) -> None:
        """Log every `every`-th step; with `ranks`, also per-rank numbers.

        A step takes `batch` samples of the `samples` in an epoch; the run ends after `last` samples.
        """
        self._emit, self._every, self._ranks = emit, every, ranks
        self._batch, self._samples, self._last = batch, samples, last
        self._pending = _PendingSteps()

    def count(self, step: int, report: StepReport, rate: float, seconds: float) -> None:
        """Add a step that was applied (or skipped) with the learning rate `rate`."""
        pending = self._pending
        pending.tokens += report.tokens
        pending.target_tokens += report.numbers.target_tokens
        pending.seconds += seconds
        pending.last = step, report, rate
        pending.is_due = step % self._every == 0

    def emit_due(self) -> None:
        """Emit the event of the last step, if it is due."""
        if self._pending.is_due:
            self.flush()

    def flush(self) -> None:
        """Emit the event of the last step, unless it was emitted already.

        Tokens and seconds are totals since the last event; loss and gradient norm are those of the last step.
        """
        pending, self._pending = self._pending, _PendingSteps()
        if pending.last is None:
            return
        step, report, rate = pending.last
        taken = step * self._batch
        self._emit(
            TrainStep(
                step=step,
                epoch=(taken if self._last is None else min(taken, self._last)) / self._samples,
                loss=report.numbers.loss,
                learning_rate=rate,
                grad_norm=report.numbers.grad_norm,
                tokens=pending.tokens,
                target_tokens=pending.target_tokens,
                seconds=pending.seconds,
                tokens_per_second=pending.tokens / pending.seconds,
                memory_bytes=report.memory_bytes,
                update_ratio=report.numbers.update_ratio,
                aux_loss=report.aux_loss,
            )
        )
        if self._ranks and len(report.rank_tokens) > 1:
            self._emit(
                TrainRanks(
                    step=step,
                    tokens=report.rank_tokens,
                    seconds=report.rank_seconds if any(report.rank_seconds) else None,
                    memory_bytes=report.rank_memory_bytes,
                )
            )

    @contextmanager
    def emitting(self) -> Iterator[None]:
        """Emit what is due on exit, however the steps inside end."""
        try:
            yield
        finally:
            self.emit_due()
