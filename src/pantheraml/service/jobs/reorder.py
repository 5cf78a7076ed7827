"""Change the order of the queue on an administrator's request."""

from __future__ import annotations

import time
from dataclasses import asdict

from sqlalchemy.ext.asyncio import AsyncSession

from pantheraml.service.jobs.scheduler import ordered, place_before
from pantheraml.service.jobs.usage import device_seconds
from pantheraml.service.store.jobs import waiting_jobs
from pantheraml.service.store.tables import Job


async def move_before(session: AsyncSession, job_id: str, before: str | None) -> str | None:
    """Put a job before another one, or at the end. Return the id that is not in the queue, if one is not."""
    queue = ordered(await waiting_jobs(session), await device_seconds(session), time.time())
    known = {job.id for job in queue}
    missing = next((name for name in (job_id, before) if name is not None and name not in known), None)
    if missing is None and job_id != before and len(queue) > 1:
        job = await session.get_one(Job, job_id)
        job.place = asdict(place_before(queue, job_id, before))
    return missing
