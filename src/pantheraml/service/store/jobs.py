"""Jobs in the database. `move` is the one place where a job's state changes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from sqlalchemy import ColumnElement, delete, exists, func, inspect, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer
from sqlalchemy.orm.attributes import set_committed_value

from pantheraml.service.jobs.scheduler import Place, WaitingJob
from pantheraml.service.jobs.states import ACTIVE, State, check_transition
from pantheraml.service.store.database import Database
from pantheraml.service.store.tables import Event, Job, Lease
from pantheraml.service.store.usage import close_stretches
from pantheraml.service.store.webhooks import announce

SHORT = (defer(Job.config, raiseload=True), defer(Job.plan, raiseload=True))
"""Options of a query for jobs whose configuration and plan are not needed."""


class StaleJobError(Exception):
    """Another transaction has changed the job's state, or started it again, since it was read."""


async def add_job(session: AsyncSession, job: Job) -> None:
    """Add a job in its first state."""
    job.state, job.state_at = State.VALIDATING, job.created_at
    session.add(job)
    await session.flush()
    session.add(_state_event(job, State.VALIDATING, "Created fine-tuning job"))


async def move(session: AsyncSession, job: Job, to: State, message: str, **changes: Any) -> None:
    """Change a job's state, and other columns with it. ForbiddenTransitionError if the transition table forbids it."""
    before, now = State(job.state), time.time()
    check_transition(before, to)
    values = {"state": to, "state_at": now, **changes}
    held = (Job.id == job.id, Job.state == before, Job.token == job.token)
    result = await session.execute(
        update(Job).where(*held).values(**values).execution_options(synchronize_session=False)
    )
    if result.rowcount != 1:  # type: ignore[attr-defined]
        raise StaleJobError(f"{job.id} is no longer {before}")
    if to not in ACTIVE:
        await session.execute(delete(Lease).where(Lease.job_id == job.id))
        await close_stretches(session, job.id, now)
    await reread(session, job)
    event = _state_event(job, to, message)
    session.add(event)
    await announce(session, job, event)


async def reread(session: AsyncSession, job: Job) -> None:
    """Refresh a row that was read earlier, perhaps by another session."""
    current = await session.get_one(Job, job.id, populate_existing=True)
    if current is not job:
        for name in inspect(Job).column_attrs.keys():  # noqa: SIM118 - not a dict
            set_committed_value(job, name, getattr(current, name))


def _state_event(job: Job, state: State, message: str) -> Event:
    level = "error" if state is State.FAILED else "warn" if state is State.CRASHED else "info"
    return Event(
        job_id=job.id,
        created_at=job.state_at,
        level=level,
        kind="state",
        message=message,
        step=None,
        data={"state": state.value, "token": job.token},
    )


async def find_job(session: AsyncSession, job_id: str, owner: str | None, *, whole: bool = False) -> Job | None:
    """Return the job with this id; None if there is none, or it belongs to another user. `owner` None: any user.
    `whole`: with its configuration and plan, which are long."""
    job = await session.get(Job, job_id, options=() if whole else SHORT)
    return job if job is not None and owner in (None, job.owner) else None


def has_pair(database: Database, name: str, value: str) -> ColumnElement[bool]:
    """Condition for jobs with this pair of metadata. The pairs are compared one by one: a name in a JSON path would
    have to be quoted, which not every name can be."""
    each = func.json_each if database.is_sqlite else func.json_each_text
    pair = each(Job.user_metadata).table_valued("key", "value")
    return exists().select_from(pair).where(pair.c.key == name, pair.c.value == value)


async def jobs_in(session: AsyncSession, states: Iterable[State]) -> list[Job]:
    query = select(Job).where(Job.state.in_([state.value for state in states])).order_by(Job.queued_at, Job.id)
    return list((await session.scalars(query)).all())


async def waiting_jobs(session: AsyncSession) -> list[WaitingJob]:
    """Return each queued job for the scheduler, without reading the large configurations."""
    columns = (Job.id, Job.owner, Job.priority, Job.queued_at, Job.processes, Job.predicted_seconds, Job.seconds_run)
    rows = await session.execute(select(*columns, Job.gpu_ids, Job.place).where(Job.state == State.QUEUED.value))
    return [
        WaitingJob(
            name,
            owner,
            priority,
            queued_at or 0.0,
            processes,
            None if predicted is None else max(0.0, predicted - ran),
            allowed=None if gpus is None else gpu_names(gpus),
            place=place and Place(**place),
            ran=ran,
        )
        for name, owner, priority, queued_at, processes, predicted, ran, gpus, place in rows
    ]


def if_paused(job: Job, now: float) -> WaitingJob | None:
    """Return a running job as it would be queued if paused; None: it may not be paused for others."""
    if job.is_test or job.state not in (State.STARTING, State.RUNNING):
        return None
    return WaitingJob(
        job.id,
        job.owner,
        job.priority,
        job.queued_at or 0.0,
        job.processes,
        None,
        place=None if job.place is None else Place(**job.place),
        ran=job.seconds_run + (0.0 if job.started_at is None else now - job.started_at),
    )


async def count_jobs(session: AsyncSession, owner: str, states: Iterable[State]) -> int:
    query = select(func.count()).select_from(Job)
    query = query.where(Job.owner == owner, Job.state.in_([state.value for state in states]))
    return (await session.scalar(query)) or 0


def gpu_names(indices: Iterable[int]) -> frozenset[str]:
    """Names of GPUs."""
    return frozenset(f"gpu:{index}" for index in indices)


async def leases(session: AsyncSession) -> dict[str, Lease]:
    """Return resource -> lease for all leased resources."""
    return {lease.resource: lease for lease in (await session.scalars(select(Lease))).all()}
