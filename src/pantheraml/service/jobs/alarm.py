"""Watch running jobs for alerts, and store each as an event exactly once, across restarts of the service."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from pantheraml.base.events import EventBase
from pantheraml.devices.health import Health
from pantheraml.service.jobs.alerts import PREFIX, Alert, JobWatch
from pantheraml.service.jobs.inventory import gpu_indices, share_of
from pantheraml.service.store.database import Database
from pantheraml.service.store.tables import Event, Job, Lease
from pantheraml.service.store.webhooks import announce

REMEMBERED_STEPS = 200
"""Read again when the service restarts."""

HealthOfGPUs = Callable[[], Mapping[int, Health]]


class Alarm:
    def __init__(self, database: Database, stall_seconds: float, health: HealthOfGPUs) -> None:
        self._database, self._stall_seconds, self._health = database, stall_seconds, health
        self._watches: dict[tuple[str, int], JobWatch] = {}

    async def look(self, job: Job, events: Iterable[EventBase]) -> bool:
        """Check a running job after these events of its run; True if there was an alert."""
        now, mark = time.time(), (job.id, job.token)
        if mark not in self._watches:
            self.forget(job.id)
            self._watches[mark] = await self._begun(job, now)
        else:
            for event in events:
                self._watches[mark].saw(event, now)
        health = self._health()
        bad = {index: each for index, each in health.items() if each.status in ("warn", "fail")}
        held = await self._held(job) if bad else []
        of_job = {index: bad[index] for index in held if index in bad}
        alerts = self._watches[mark].judge(now, of_job if health else None)
        if alerts:
            async with self._database.write() as session:
                for alert in alerts:
                    told = _event(job.id, now, alert)
                    session.add(told)
                    await announce(session, job, told)
        return bool(alerts)

    def forget(self, job_id: str) -> None:
        self._watches = {mark: watch for mark, watch in self._watches.items() if mark[0] != job_id}

    async def _begun(self, job: Job, now: float) -> JobWatch:
        """Rebuild the watch of a job from the database."""
        async with self._database.read() as session:
            active = await active_alerts(session, job.id)
            watch = JobWatch(now, self._stall_seconds, active, share=share_of(job.leased))
            of_start = select(Event.id).where(Event.job_id == job.id, Event.kind == "train.started")
            first = await session.scalar(of_start.order_by(Event.id.desc()).limit(1))
            query = select(Event).where(Event.job_id == job.id, Event.kind == "train.step", Event.id > (first or 0))
            steps = (await session.scalars(query.order_by(Event.id.desc()).limit(REMEMBERED_STEPS))).all()
        for step in reversed(steps):
            watch.saw_step(step.created_at, step.data.get("train_loss"), step.data.get("tokens_per_second"))
        return watch

    async def _held(self, job: Job) -> list[int]:
        async with self._database.read() as session:
            names = (await session.scalars(select(Lease.resource).where(Lease.job_id == job.id))).all()
        return gpu_indices(names) or []


async def active_alerts(session: AsyncSession, job_id: str) -> list[str]:
    """Return the kinds of a job's active alerts."""
    query = select(Event.kind, Event.data).where(Event.job_id == job_id, Event.kind.startswith(PREFIX))
    active = {kind: bool(data.get("active")) for kind, data in await session.execute(query.order_by(Event.id))}
    return sorted(kind for kind, is_on in active.items() if is_on)


def _event(job_id: str, now: float, alert: Alert) -> Event:
    return Event(
        job_id=job_id,
        created_at=now,
        level=alert.level,
        kind=alert.kind,
        message=alert.message,
        step=None,
        data={"active": alert.active, **alert.data},
    )
