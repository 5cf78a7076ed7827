"""Recent device seconds of each user (half-life: half a day), and what usage costs."""

from __future__ import annotations

import math
import time

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from pantheraml.service.jobs.inventory import share_of
from pantheraml.service.store.tables import Job, Stretch

HALF_LIFE_SECONDS = 12 * 3600.0
_REMEMBERED = 6 * HALF_LIFE_SECONDS


async def device_seconds(session: AsyncSession, now: float | None = None) -> dict[str, float]:
    """Device seconds of each user, each second halved with every half-life since then. `now` None: the time."""
    now = time.time() if now is None else now
    columns = (Stretch.owner, Stretch.devices * Stretch.share, Stretch.started_at, Stretch.ended_at)
    recent = (Stretch.started_at < now) & (Stretch.ended_at.is_(None) | (Stretch.ended_at > now - _REMEMBERED))
    usage: dict[str, float] = {}
    for owner, devices, start, end in await session.execute(select(*columns).where(recent)):
        ages = now - (now if end is None else min(end, now)), now - start
        newest, oldest = (0.5 ** (age / HALF_LIFE_SECONDS) for age in ages)
        usage[owner] = usage.get(owner, 0.0) + devices * (newest - oldest) * HALF_LIFE_SECONDS / math.log(2)
    return usage


def device_hours_of(job: Job) -> float:
    """Return the device hours of a job, in which a share of a GPU counts as that part of it."""
    running = time.time() - job.started_at if job.finished_at is None and job.started_at is not None else 0.0
    return job.processes * share_of(job.leased) * (job.seconds_run + max(0.0, running)) / 3600.0


def cost_of(gpu_hours: float, price: float | None) -> float | None:
    """Return the cost; None: the service has no price."""
    return None if price is None else gpu_hours * price
