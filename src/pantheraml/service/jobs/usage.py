"""Recent device seconds of each user (half-life: half a day), and what usage costs."""

from __future__ import annotations

import time

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from pantheraml.service.store.tables import Job

HALF_LIFE_SECONDS = 12 * 3600.0
_REMEMBERED = 6 * HALF_LIFE_SECONDS


async def device_seconds(session: AsyncSession) -> dict[str, float]:
    now = time.time()
    columns = (Job.owner, Job.processes, Job.seconds_run, Job.started_at, Job.finished_at, Job.state_at)
    recent = (Job.token > 0) & (Job.state_at > now - _REMEMBERED)
    usage: dict[str, float] = {}
    for owner, processes, seconds, started, finished, since in await session.execute(select(*columns).where(recent)):
        running = now - started if finished is None and started is not None else 0.0
        age = 0.0 if running else now - since
        usage[owner] = usage.get(owner, 0.0) + processes * (seconds + running) * 0.5 ** (age / HALF_LIFE_SECONDS)
    return usage


def device_hours_of(job: Job) -> float:
    """Return the device hours of a job."""
    running = time.time() - job.started_at if job.finished_at is None and job.started_at is not None else 0.0
    return job.processes * (job.seconds_run + max(0.0, running)) / 3600.0


def cost_of(gpu_hours: float, price: float | None) -> float | None:
    """Return the cost; None: the service has no price."""
    return None if price is None else gpu_hours * price
