"""OpenAI's fine-tuning jobs: create, list, retrieve, cancel, pause, resume, events, checkpoints."""

from __future__ import annotations

import re
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request
from sqlalchemy import exists, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from pantheraml.service import audit
from pantheraml.service.auth import Principal, Reader, Submitter
from pantheraml.service.context import Context, ServiceContext
from pantheraml.service.errors import ApiError, not_found
from pantheraml.service.ids import number_of
from pantheraml.service.jobs.states import ENDED, ForbiddenTransitionError, State
from pantheraml.service.jobs.submit import plan_job, random_seed, submit
from pantheraml.service.jobs.usage import cost_of
from pantheraml.service.schemas.fine_tuning import (
    METRIC_KINDS,
    MOST_PAIRS,
    SHOWN,
    CreateJob,
    Waiting,
    checkpoint_object,
    event_object,
    job_object,
)
from pantheraml.service.store.jobs import SHORT, find_job, has_pair, move
from pantheraml.service.store.pages import fetch_page
from pantheraml.service.store.tables import Event, Job

router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["fine-tuning"])

_METADATA = re.compile(r"metadata\[.*\]", re.DOTALL)
_CHECKPOINT_FIGURES = ("train_loss", "valid_loss")
After = Annotated[str | None, Query(max_length=64)]
_FEW = 100
_WAITING = {
    State.VALIDATING: "its files are being validated",
    State.PAUSED: "it is paused; resume it",
    State.CRASHED: "its processes ended unexpectedly; it is about to be queued again",
    State.STARTING: "its processes are starting: the model is loaded and the data prepared",
}


@router.post("")
async def create_job(
    body: CreateJob,
    request: Request,
    principal: Submitter,
    context: Context,
    dry_run: bool = False,
    idempotency_key: Annotated[str | None, Header(max_length=255)] = None,
) -> dict[str, Any]:
    """Queue a job. `dry_run=true` queues nothing and answers with the plan: devices, memory and time, with reasons."""
    if dry_run:
        planned = await plan_job(body, principal, context, random_seed() if body.seed is None else body.seed)
        price, hours = context.settings.price_per_gpu_hour, planned.gpu_hours
        return {
            "object": "fine_tuning.plan",
            "hyperparameters": planned.hyperparameters,
            "predicted_seconds": planned.predicted_seconds,
            "predicted_gpu_hours": hours,
            "predicted_cost": None if hours is None else cost_of(hours, price),
            "plan": planned.plan.model_dump(mode="json"),
        }
    job = await submit(
        body,
        principal,
        context,
        idempotency_key=idempotency_key,
        record=lambda session, job_id: audit.record(session, principal, "job.create", job_id, request),
    )
    return _shown(job, context)


@router.get("")
async def list_jobs(
    request: Request,
    principal: Reader,
    context: Context,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
) -> dict[str, Any]:
    """Newest first. `metadata[k]=v` keeps jobs with this pair, `metadata=null` those without metadata."""
    query = select(Job).options(*SHORT)
    if principal.owner is not None:
        query = query.where(Job.owner == principal.owner)
    pairs = {name[9:-1]: value for name, value in request.query_params.multi_items() if _METADATA.fullmatch(name)}
    if len(pairs) > MOST_PAIRS:
        raise ApiError(400, f"At most {MOST_PAIRS} pairs can be asked for.", param="metadata")
    query = query.where(*(has_pair(context.database, name, value) for name, value in pairs.items()))
    if request.query_params.get("metadata") == "null":
        query = query.where(Job.user_metadata.is_(None))
    cursor = None if after is None else await existing_job(context, principal, after, param="after")
    async with _reading(context, limit) as session:
        page = await fetch_page(session, query, Job, limit=limit, cursor=cursor)
    return {"object": "list", "data": [_shown(job, context) for job in page.rows], "has_more": page.has_more}


@router.get("/{job_id}")
async def retrieve_job(job_id: str, principal: Reader, context: Context) -> dict[str, Any]:
    return _shown(await existing_job(context, principal, job_id), context)


@router.post("/{job_id}/cancel")
async def cancel_job(job_id: str, request: Request, principal: Submitter, context: Context) -> dict[str, Any]:
    """End a job and free its devices within ten seconds; one that does not run ends at once."""
    job = await _change(job_id, "cancel", request, principal, context)
    return _shown(job, context)


@router.post("/{job_id}/pause")
async def pause_job(job_id: str, request: Request, principal: Submitter, context: Context) -> dict[str, Any]:
    """Have a job save its state and free its devices."""
    return _shown(await _change(job_id, "pause", request, principal, context), context)


@router.post("/{job_id}/resume")
async def resume_job(job_id: str, request: Request, principal: Submitter, context: Context) -> dict[str, Any]:
    """Put a paused job back into the queue; it continues exactly where it was."""
    return _shown(await _change(job_id, "resume", request, principal, context), context)


_TARGETS: dict[str, dict[State, tuple[State, str]]] = {
    "cancel": {
        State.VALIDATING: (State.CANCELLED, "Cancelled"),
        State.QUEUED: (State.CANCELLED, "Cancelled"),
        State.PAUSED: (State.CANCELLED, "Cancelled"),
        State.CRASHED: (State.CANCELLED, "Cancelled"),
        State.STARTING: (State.CANCELLING, "Cancelling"),
        State.RUNNING: (State.CANCELLING, "Cancelling"),
        State.PAUSING: (State.CANCELLING, "Cancelling"),
    },
    "pause": {
        State.QUEUED: (State.PAUSED, "Paused"),
        State.STARTING: (State.PAUSING, "Pausing: its state is being saved"),
        State.RUNNING: (State.PAUSING, "Pausing: its state is being saved"),
    },
    "resume": {State.PAUSED: (State.QUEUED, "Resumed, job queued")},
}
_ALREADY = {
    "cancel": {State.CANCELLING, State.CANCELLED},
    "pause": {State.PAUSING, State.PAUSED},
    "resume": {State.QUEUED, State.STARTING, State.RUNNING},
}


async def _change(job_id: str, action: str, request: Request, principal: Principal, context: ServiceContext) -> Job:
    await existing_job(context, principal, job_id)
    async with context.database.write() as session:
        job = await session.get_one(Job, job_id)
        state = State(job.state)
        if state in _ALREADY[action]:
            if action == "pause" and job.preempted_by is not None:
                job.preempted_by = None  # stays paused instead of being requeued
                audit.record(session, principal, "job.pause", job_id, request)
            return job
        if state not in _TARGETS[action]:
            raise ApiError(400, f"A job that is {state} cannot be told to {action}.", code="wrong_state")
        to, message = _TARGETS[action][state]
        changes = {"finished_at": job.state_at} if to in ENDED else {}
        try:
            await move(session, job, to, message, **changes)
        except ForbiddenTransitionError as err:
            raise ApiError(400, str(err), code="wrong_state") from err
        audit.record(session, principal, f"job.{action}", job_id, request)
    context.notifier.notify(job_id)
    context.dispatcher.wake()
    return job


@router.get("/{job_id}/events")
async def list_events(
    job_id: str,
    principal: Reader,
    context: Context,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 20,
    type: Literal["message", "metrics"] | None = None,
) -> dict[str, Any]:
    """Newest first. `type`: only the messages, or only the figures of steps."""
    await existing_job(context, principal, job_id)
    query = select(*SHOWN).where(Event.job_id == job_id)
    if type is not None:
        query = query.where(Event.kind.in_(METRIC_KINDS) if type == "metrics" else Event.kind.not_in(METRIC_KINDS))
    return await _event_page(context, query, after, limit, "ftevent-", event_object)


@router.get("/{job_id}/checkpoints")
async def list_checkpoints(
    job_id: str,
    principal: Reader,
    context: Context,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 10,
) -> dict[str, Any]:
    """Existing checkpoints, newest first, with the figures of their steps."""
    job = await existing_job(context, principal, job_id)
    figures = Event.kind.in_(["train.step", "eval.done"])
    async with context.database.read() as session:
        saved = select(Event.step).where(Event.job_id == job_id, Event.kind == "checkpoint.saved")
        query = select(Event).where(Event.job_id == job_id, figures, Event.step.in_(saved)).order_by(Event.id)
        metrics: dict[int | None, dict[str, Any]] = {}
        for event in (await session.scalars(query)).all():
            figures_of = metrics.setdefault(event.step, {})
            figures_of |= {name: event.data[name] for name in _CHECKPOINT_FIGURES if name in event.data}
    later = aliased(Event)
    replaced = later.kind.in_(["checkpoint.saved", "checkpoint.removed"]) & (later.step == Event.step)
    query = select(*SHOWN).where(Event.job_id == job_id, Event.kind == "checkpoint.saved")
    query = query.where(~exists().where(later.job_id == job_id, later.id > Event.id, replaced))

    def shown(event: Event) -> dict[str, Any]:
        return checkpoint_object(event, job, metrics.get(event.step, {}))

    return await _event_page(context, query, after, limit, "ftckpt-", shown)


async def _event_page(
    context: ServiceContext, query: Any, after: str | None, limit: int, prefix: str, shown: Any
) -> dict[str, Any]:
    if after is not None:
        number = number_of(after, prefix)
        if number is None:
            raise not_found("item", after, param="after")
        query = query.where(Event.id < number)
    async with _reading(context, limit) as session:
        rows = (await session.execute(query.order_by(Event.id.desc()).limit(limit + 1))).all()
    return {"object": "list", "data": [shown(event) for event in rows[:limit]], "has_more": len(rows) > limit}


def _reading(context: ServiceContext, limit: int) -> AbstractAsyncContextManager[AsyncSession]:
    return context.database.glance() if limit <= _FEW else context.database.read()


async def existing_job(
    context: ServiceContext,
    principal: Principal,
    job_id: str,
    *,
    param: str = "fine_tuning_job_id",
    whole: bool = False,
) -> Job:
    async with context.database.glance() as session:
        job = await find_job(session, job_id, principal.owner, whole=whole)
    if job is None:
        raise not_found("fine-tuning job", job_id, param=param)
    return job


def _shown(job: Job, context: ServiceContext) -> dict[str, Any]:
    price, end = context.settings.price_per_gpu_hour, context.dispatcher.expected_end(job.id)
    return job_object(job, _waiting(job, context), price, end)


def _waiting(job: Job, context: ServiceContext) -> Waiting | None:
    state = State(job.state)
    if state in _WAITING:
        return Waiting(reason=_WAITING[state])
    if state is not State.QUEUED:
        return None
    reason = context.dispatcher.reason(job.id)
    if reason is None:
        return Waiting(reason="it was queued a moment ago")
    start = reason.estimated_start
    return Waiting(
        reason=reason.text, queue_position=reason.position, estimated_start=None if start is None else int(start)
    )
