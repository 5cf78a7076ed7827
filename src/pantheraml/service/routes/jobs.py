"""Routes beyond OpenAI's API: live events, metric series, logs, artifacts and the plan of a job."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT
from sqlalchemy import Text, cast, func, select

from pantheraml.runs.supervised import SupervisedRun
from pantheraml.service import audit
from pantheraml.service.auth import Reader, Submitter
from pantheraml.service.context import Context, ServiceContext
from pantheraml.service.errors import ApiError, not_found
from pantheraml.service.ids import number_of
from pantheraml.service.jobs.again import request_of, shown_config
from pantheraml.service.jobs.artifacts import artifacts_of
from pantheraml.service.jobs.curves import KINDS as CURVE_KINDS
from pantheraml.service.jobs.delete_model import delete_checkpoints as remove_checkpoints
from pantheraml.service.jobs.states import ENDED, State
from pantheraml.service.jobs.thin import thinned
from pantheraml.service.jobs.timeline import timeline
from pantheraml.service.routes.fine_tuning import existing_job
from pantheraml.service.store.tables import Event, Job
from pantheraml.service.stored import StoredFile


async def _readable(job_id: str, principal: Reader, context: Context) -> Job:
    return await existing_job(context, principal, job_id)


async def _readable_whole(job_id: str, principal: Reader, context: Context) -> Job:
    return await existing_job(context, principal, job_id, whole=True)


ReadableJob = Annotated[Job, Depends(_readable)]
"""The job of the path, if the principal may see it."""
WholeJob = Annotated[Job, Depends(_readable_whole)]
"""With its configuration and plan."""


async def _last_event(last_event_id: Annotated[str | None, Header()] = None) -> int:
    number = number_of(last_event_id, "ftevent-") if last_event_id else 0
    if number is None:
        raise ApiError(400, "Last-Event-ID is not the id of an event.", param="Last-Event-ID")
    return number


LastEvent = Annotated[int, Depends(_last_event)]
"""A refusal must come before the stream begins, and so not from within it."""

router = APIRouter(prefix="/v1/fine_tuning/jobs/{job_id}", tags=["jobs"])

_LOOK_AGAIN_SECONDS = 15.0
"""Seconds between polls without a notification: another process may have written to the database."""
_CHECK_KEY_SECONDS = 10.0
"""A key may be revoked, or expire, while a stream that it has opened goes on."""
_UNBUFFERED = {"cache-control": "no-cache", "x-accel-buffering": "no"}
POINTS = 2000


class LiveEvents(StreamingResponse):
    """Server-sent events that are encoded already. FastAPI's own class encodes each again for each reader."""

    media_type = "text/event-stream"


@router.get("/stream", response_class=LiveEvents)
async def stream_events(
    job: ReadableJob,
    context: Context,
    last: LastEvent,
    request: Request,
) -> LiveEvents:
    """Events as they come, from the first on, or after `Last-Event-ID`. Ends with the job, or the key."""
    return LiveEvents(_told(context, job.id, last, request), headers=_UNBUFFERED)


async def _told(context: ServiceContext, job_id: str, last: int, request: Request) -> AsyncIterator[bytes]:
    checked = time.monotonic()
    while not context.notifier.closed:
        if time.monotonic() - checked > _CHECK_KEY_SECONDS:
            if not await _is_still_allowed(request, context):
                return
            checked = time.monotonic()
        with context.notifier.listening(job_id) as wake:
            news = await context.news.after(job_id, last)
            last = news.last
            if news.content:
                yield news.content
            if news.ended:
                return
            if news.more:
                continue
            try:
                async with asyncio.timeout(_LOOK_AGAIN_SECONDS):
                    await wake.wait()
            except TimeoutError:
                yield KEEPALIVE_COMMENT


async def _is_still_allowed(request: Request, context: ServiceContext) -> bool:
    try:
        await context.authenticator.principal(request)
    except ApiError:
        return False
    return True


@router.get("/series")
async def metric_series(
    job: ReadableJob,
    context: Context,
    metric: Annotated[str, Query(max_length=64)] = "train_loss",
    after: Annotated[int, Query(ge=0, lt=1 << 62)] = 0,
    points: Annotated[int, Query(ge=2, le=20_000)] = POINTS,
) -> dict[str, Any]:
    """Steps and values of a figure, thinned to about `points` with minima and maxima kept. `after`: a `cursor`."""
    kinds = Event.kind.in_(["train.step", "eval.done"])
    query = select(Event.id, Event.step, Event.data).where(Event.job_id == job.id, kinds, Event.id > after)
    async with context.database.read() as session:
        rows = (await session.execute(query.order_by(Event.id))).all()
    found = [(step, data[metric]) for _, step, data in rows if isinstance(data.get(metric), int | float)]
    kept = thinned(found, points)
    cursor = rows[-1][0] if rows else after
    return {
        "metric": metric,
        "steps": [step for step, _ in kept],
        "values": [value for _, value in kept],
        "total": len(found),
        "cursor": cursor,
    }


@router.get("/curves")
async def job_curves(
    job: ReadableJob, context: Context, points: Annotated[int, Query(ge=2, le=20_000)] = POINTS
) -> Response:
    """All figures over the steps, each thinned to about `points`, with the epoch, tokens and seconds at each point.
    The stream continues after `cursor` (`Last-Event-ID: ftevent-<cursor>`)."""
    columns = (Event.id, Event.kind, Event.step, cast(Event.data, Text))  # parsed in a thread
    chosen = (Event.job_id == job.id, Event.kind.in_(CURVE_KINDS))
    async with context.database.read() as session:
        newest = await session.scalar(select(func.max(Event.id)).where(*chosen)) or 0
        content = context.curves.get(job.id, points, newest)
        query = select(*columns).where(*chosen, Event.id <= newest).order_by(Event.id)
        found = (await session.execute(query)).all() if content is None else ()
        rows = [(event, kind, step or 0, data) for event, kind, step, data in found]
    if content is None:
        content = await asyncio.to_thread(context.curves.make, job.id, points, newest, rows)
    return Response(content, media_type="application/json")


@router.get("/hardware")
async def hardware(
    job: ReadableJob, context: Context, after: Annotated[int, Query(ge=0, lt=1 << 62)] = 0
) -> dict[str, Any]:
    """GPUs and host while it ran. `after`: the `cursor` of an earlier answer. None: not reported by the driver."""
    return await asyncio.to_thread(timeline, _run(context, job).run_dir.path, after)


@router.get("/config")
async def job_config(job: WholeJob, context: Context) -> dict[str, Any]:
    """Its configuration, and the `request` that repeats the job. Folders of this machine are not shown."""
    return {"config": shown_config(job.config, context.dispatcher.hide), "request": request_of(job)}


@router.get("/logs", response_class=StoredFile)
async def logs(job: ReadableJob, context: Context) -> Response:
    """Output of the job's processes; ranges of bytes are possible (`Range: bytes=-65536` for the end)."""
    log = _run(context, job).log
    if not log.is_file() or not log.stat().st_size:
        return PlainTextResponse("")  # nothing was written yet, and no range of nothing can be given
    return StoredFile(log, media_type="text/plain; charset=utf-8")


@router.get("/artifacts")
async def list_artifacts(job: ReadableJob, context: Context) -> dict[str, Any]:
    """Files that the run has written for its user: the trained weights, the report, the summary."""
    found = await asyncio.to_thread(artifacts_of, _run(context, job).run_dir)
    data = [{"name": name, "bytes": path.stat().st_size} for name, path in found.items()]
    return {"object": "list", "data": data, "has_more": False}


@router.get("/artifacts/{name:path}", response_class=StoredFile)
async def get_artifact(job: ReadableJob, name: str, context: Context) -> StoredFile:
    """One of them; ranges of bytes are possible."""
    path: Path | None = (await asyncio.to_thread(artifacts_of, _run(context, job).run_dir)).get(name)
    if path is None:
        raise not_found("artifact", name, param="name")
    return StoredFile(path, media_type="application/octet-stream", filename=path.name)


@router.delete("/checkpoints")
async def delete_checkpoints(
    principal: Submitter, job: ReadableJob, request: Request, context: Context
) -> dict[str, Any]:
    """Remove the checkpoints of a job that has ended, which count against the quota of its user. Its model stays."""
    if State(job.state) not in ENDED:
        message = f"The job is {job.state}: it continues from its checkpoints. Cancel it first."
        raise ApiError(400, message, param="fine_tuning_job_id", code="wrong_state")
    async with context.database.write() as session:
        audit.record(session, principal, "job.delete_checkpoints", job.id, request)
    await remove_checkpoints(context.database, context.settings, job.id, "by its user")
    context.quota.measure_again(job.owner)
    return {"id": job.id, "object": "fine_tuning.job.checkpoints", "deleted": True}


@router.get("/plan")
async def plan(job: WholeJob) -> dict[str, Any]:
    """The planner's choices for the job, with reasons."""
    return job.plan


def _run(context: ServiceContext, job: Job) -> SupervisedRun:
    """The job's run; only for an id that the database knows."""
    return SupervisedRun(context.settings.jobs.resolve() / job.id, job.id)
