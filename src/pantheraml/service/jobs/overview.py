"""The current state: devices and their holders, the queue, running jobs with time left, incidents."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import load_only

from pantheraml.devices.health import Health
from pantheraml.devices.sampler import GPUSnapshot
from pantheraml.service.auth import Principal
from pantheraml.service.context import ServiceContext
from pantheraml.service.jobs.alarm import active_alerts
from pantheraml.service.jobs.inventory import card_of
from pantheraml.service.jobs.pace import pace_of
from pantheraml.service.jobs.states import ACTIVE, State
from pantheraml.service.store.tables import Event, Job, Lease
from pantheraml.specs.service_api import DeviceHolder, DeviceStatus, HostStatus, Incident, QueueEntry, RunningJob

_LATELY_SECONDS = 30.0
_SHOWN = (Job.id, Job.owner, Job.model, Job.priority, Job.processes, Job.queued_at, Job.suffix)
"""Columns shown of a job in the queue."""
_CHUNK = 100
"""Jobs that are asked for at once."""


def host_now(context: ServiceContext) -> HostStatus:
    spec = context.dispatcher.inventory.spec
    sample = next(reversed(context.sampler.samples(after=time.monotonic() - _LATELY_SECONDS)), None)
    return HostStatus(
        cpu_count=spec.cpu_count,
        cpu_percent=None if sample is None else sample.cpu_percent,
        ram_used_bytes=None if sample is None else sample.ram_used_bytes,
        ram_total_bytes=spec.ram_bytes,
        driver=spec.driver,
        note=spec.note,
    )


async def devices_now(
    session: AsyncSession, context: ServiceContext, principal: Principal, held: Mapping[str, Lease]
) -> list[DeviceStatus]:
    inventory = context.dispatcher.inventory
    holders = await holders_of_cards(session, principal, held)
    sample = next(reversed(context.sampler.samples(after=time.monotonic() - _LATELY_SECONDS)), None)
    snapshots = {} if sample is None else {each.index: each for each in sample.gpus}
    health = context.sampler.health()
    gpus = {f"gpu:{gpu.index}": gpu for gpu in inventory.spec.gpus}
    found = []
    for name in inventory.cards:
        gpu, there = gpus.get(name), holders.get(name, [])
        index = None if gpu is None else gpu.index
        visible = next((each for each in there if each.job is not None), None)
        found.append(
            DeviceStatus(
                device=name,
                kind="cpu" if gpu is None else "gpu",
                name=None if gpu is None else gpu.name,
                in_use=bool(there),
                jobs_at_most=inventory.jobs_per_gpu,
                holders=there,
                job=None if visible is None else visible.job,
                user=None if visible is None else visible.user,
                **_readings(None if index is None else snapshots.get(index)),
                **_judgement(None if index is None else health.get(index)),
            )
        )
    return found


async def holders_of_cards(
    session: AsyncSession, principal: Principal, held: Mapping[str, Lease]
) -> dict[str, list[DeviceHolder]]:
    """Return the jobs on each GPU or CPU slot."""
    jobs = {lease.job_id for lease in held.values()}
    query = select(Job.id, Job.owner).where(Job.id.in_(jobs))
    owners = {row.id: row.owner for row in await session.execute(query)} if jobs else {}
    found: dict[str, list[DeviceHolder]] = {}
    for name in sorted(held):
        job = held[name].job_id
        owner = owners.get(job)
        is_mine = owner is not None and principal.owner in (None, owner)
        holder = DeviceHolder(job=job if is_mine else None, user=owner if is_mine else None)
        found.setdefault(card_of(name), []).append(holder)
    return found


def _readings(now: GPUSnapshot | None) -> dict[str, Any]:
    if now is None:
        return {}
    return {
        "memory_total_bytes": now.total_bytes,
        "memory_used_bytes": now.used_bytes,
        "utilization_percent": now.utilization_percent,
        "temperature_celsius": now.temperature_celsius,
        "power_watts": now.power_watts,
    }


def _judgement(health: Health | None) -> dict[str, Any]:
    return {} if health is None else {"health": health.status, "health_reasons": list(health.reasons)}


async def queue_now(
    session: AsyncSession, context: ServiceContext, principal: Principal, limit: int | None
) -> tuple[list[QueueEntry], int]:
    """Return the first jobs of the queue, and its length."""
    queued = Job.state == State.QUEUED.value
    length = (await session.scalar(select(func.count()).select_from(Job).where(queued))) or 0
    wanted = length if limit is None else min(limit, length)
    found = []
    for position, row in enumerate(await _first_rows(session, context, wanted), 1):
        name, owner, model, priority, processes, queued_at, suffix = row
        mine, reason = principal.owner in (None, owner), context.dispatcher.reason(name)
        start = None if reason is None else reason.estimated_start
        found.append(
            QueueEntry(
                position=position,
                job=name if mine else None,
                user=owner if mine else None,
                model=model if mine else None,
                suffix=suffix if mine else None,
                priority=priority,
                devices=processes,
                waiting_reason="it was queued a moment ago" if reason is None else _told(reason.text, mine),
                estimated_start=None if start is None else int(start),
                queued_at=None if queued_at is None else int(queued_at),
            )
        )
    return found, length


async def _first_rows(session: AsyncSession, context: ServiceContext, wanted: int) -> list[Any]:
    """Return the first rows of the queue, in the order that the dispatcher saw last; jobs queued since then come last.

    A long queue is not read whole: its head is asked for by name.
    """
    query = select(*_SHOWN).where(Job.state == State.QUEUED.value)
    order = context.dispatcher.queue()
    rows: dict[str, Any] = {}
    for begin in range(0, len(order), _CHUNK):
        names = order[begin : begin + _CHUNK]
        known = {row[0]: row for row in await session.execute(query.where(Job.id.in_(names)))}
        rows |= {name: known[name] for name in names if name in known}
        if len(rows) >= wanted:
            return list(rows.values())[:wanted]
    newest = query.order_by(Job.queued_at.desc(), Job.id.desc()).limit(wanted)
    seen = {*order}
    late = [row for row in await session.execute(newest) if row[0] not in seen]
    return [*rows.values(), *reversed(late)][:wanted]


def _told(reason: str, mine: bool) -> str:
    return reason if mine else "waits for its turn"


async def running_now(session: AsyncSession, principal: Principal, held: Mapping[str, Lease]) -> list[RunningJob]:
    query = select(Job).where(Job.state.in_([state.value for state in ACTIVE])).order_by(Job.started_at, Job.id)
    columns = load_only(Job.id, Job.owner, Job.model, Job.suffix, Job.state, Job.started_at, Job.token)
    if principal.owner is not None:
        query = query.where(Job.owner == principal.owner)
    jobs = (await session.scalars(query.options(columns))).all()
    return [
        await _running(session, job, sorted(name for name, lease in held.items() if lease.job_id == job.id))
        for job in jobs
    ]


async def _running(session: AsyncSession, job: Job, devices: list[str]) -> RunningJob:
    pace = await pace_of(session, job.id)
    last, total = pace.last, pace.total_steps
    step = None if last is None else last.step
    return RunningJob(
        job=job.id,
        user=job.owner,
        model=job.model,
        suffix=job.suffix,
        state=job.state,
        devices=devices,
        started_at=None if job.started_at is None else int(job.started_at),
        step=step,
        total_steps=total,
        progress=None if not total or step is None else min(1.0, step / total),
        epoch=None if last is None else last.data.get("epoch"),
        train_loss=None if last is None else last.data.get("train_loss"),
        tokens_per_second=None if last is None else last.data.get("tokens_per_second"),
        seconds_left=pace.seconds_left(time.time()),
        alerts=await active_alerts(session, job.id),
    )


async def incidents_now(session: AsyncSession, principal: Principal, limit: int) -> list[Incident]:
    """Warnings and errors of jobs, the newest first."""
    query = select(Event, Job.model, Job.suffix).join(Job, Job.id == Event.job_id).where(Event.level != "info")
    if principal.owner is not None:
        query = query.where(Job.owner == principal.owner)
    rows = await session.execute(query.order_by(Event.id.desc()).limit(limit))
    return [
        Incident(
            id=f"ftevent-{event.id}",
            job=event.job_id,
            model=model,
            suffix=suffix,
            created_at=int(event.created_at),
            level=event.level,
            kind=event.kind,
            message=event.message,
            step=event.step,
        )
        for event, model, suffix in rows
    ]
