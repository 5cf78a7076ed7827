"""Usage of jobs: one row per start, opened with its leases and closed when they are released."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Float, case, func, literal, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.sql.elements import ColumnElement

from pantheraml.service.jobs.inventory import share_of
from pantheraml.service.store.tables import Job, Stretch


def open_stretch(session: AsyncSession, job: Job, token: int, devices: Sequence[str], now: float) -> None:
    """Note that a job holds devices from now on."""
    session.add(
        Stretch(
            job_id=job.id,
            token=token,
            owner=job.owner,
            model=job.model,
            device=job.device,
            devices=len(devices),
            share=share_of(devices),
            started_at=now,
            ended_at=None,
            energy_joules=None,
        )
    )


async def close_stretches(session: AsyncSession, job_id: str, now: float) -> None:
    open_ones = (Stretch.job_id == job_id, Stretch.ended_at.is_(None))
    await session.execute(
        update(Stretch).where(*open_ones).values(ended_at=now).execution_options(synchronize_session=False)
    )


async def add_energy(session: AsyncSession, job: Job, joules: float) -> None:
    """Add energy used by a job's GPUs to the job and to its current start."""
    job.energy_joules = (job.energy_joules or 0.0) + joules
    of_start = (Stretch.job_id == job.id, Stretch.token == job.token)
    values = {"energy_joules": func.coalesce(Stretch.energy_joules, 0.0) + joules}
    await session.execute(update(Stretch).where(*of_start).values(values).execution_options(synchronize_session=False))


@dataclass(frozen=True)
class Used:
    user: str
    job: str | None
    model: str | None
    jobs: int
    starts: int
    gpu_hours: float
    cpu_slot_hours: float
    energy_joules: float | None
    """Energy of all starts that overlap the period: when within a start it was used is not known."""


def _hours(start: float | None, end: float) -> ColumnElement[Any]:
    """Device hours of a row within the period."""
    until = func.coalesce(Stretch.ended_at, end)
    last = case((until > end, literal(end, Float)), else_=until)
    first: ColumnElement[Any] = Stretch.started_at.expression
    if start is not None:
        first = case((Stretch.started_at < start, literal(start, Float)), else_=Stretch.started_at)
    return (last - first) * Stretch.devices * Stretch.share / 3600.0


async def used(
    session: AsyncSession,
    *,
    start: float | None,
    end: float,
    owner: str | None,
    by_job: bool,
    limit: int | None = None,
) -> list[Used]:
    """Return the usage of each user or job in the period, largest first. `owner` None: all users; `start` None: from
    the first start on."""
    hours = _hours(start, end)
    gpu_hours = func.sum(case((Stretch.device == "cuda", hours), else_=0.0))
    slot_hours = func.sum(case((Stretch.device == "cuda", 0.0), else_=hours))
    jobs_column = func.count(Stretch.job_id.distinct())
    columns = [Stretch.owner, jobs_column, func.count(), gpu_hours, slot_hours, func.sum(Stretch.energy_joules)]
    names = [Stretch.job_id, Stretch.model] if by_job else []
    query = select(*columns, *names).group_by(Stretch.owner, *names).where(Stretch.started_at < end)
    if start is not None:
        query = query.where(Stretch.ended_at.is_(None) | (Stretch.ended_at > start))
    if owner is not None:
        query = query.where(Stretch.owner == owner)
    query = query.order_by((gpu_hours + slot_hours).desc(), Stretch.owner).limit(limit)
    return [
        Used(user, names[0] if names else None, names[1] if names else None, count, starts, gpu, slots, energy)
        for user, count, starts, gpu, slots, energy, *names in await session.execute(query)
    ]


async def device_hours(session: AsyncSession, days: float) -> dict[str, float]:
    """Device hours of each user in the last days."""
    now = time.time()
    found = await used(session, start=now - 86400 * days, end=now, owner=None, by_job=False)
    return {each.user: each.gpu_hours + each.cpu_slot_hours for each in found}
