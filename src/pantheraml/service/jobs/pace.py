"""Estimate a running job's remaining time from its newest steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from pantheraml.service.store.tables import Event

PACE_STEPS = 20
"""Number of newest steps that the estimate uses."""


@dataclass(frozen=True)
class Pace:
    last: Event | None
    """The newest step, perhaps of an earlier start."""
    total_steps: int | None
    of_this_start: Sequence[Event]
    """The newest steps of the current start, the newest first."""

    def seconds_left(self, now: float) -> float | None:
        """None: not known."""
        if self.total_steps is None or len(self.of_this_start) < 2:
            return None
        last, first = self.of_this_start[0], self.of_this_start[-1]
        gained, elapsed = (last.step or 0) - (first.step or 0), last.created_at - first.created_at
        if gained <= 0 or elapsed <= 0:
            return None
        left = (self.total_steps - (last.step or 0)) * elapsed / gained
        return max(0.0, left - max(0.0, now - last.created_at))


async def pace_of(session: AsyncSession, job_id: str) -> Pace:
    newest = select(Event).where(Event.job_id == job_id).order_by(Event.id.desc())
    started = await session.scalar(newest.where(Event.kind == "train.started").limit(1))
    steps = (await session.scalars(newest.where(Event.kind == "train.step").limit(PACE_STEPS))).all()
    total = None if started is None else started.data.get("total_steps")
    this_start = [event for event in steps if started is None or event.id > started.id]
    return Pace(steps[0] if steps else None, total, this_start)
