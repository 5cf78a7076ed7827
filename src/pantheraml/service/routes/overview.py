"""Overview: devices, the queue and its order, running jobs, incidents."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Query, Request

from pantheraml import __version__
from pantheraml.service import audit
from pantheraml.service.auth import SCOPES, Admin, Reader
from pantheraml.service.context import Context
from pantheraml.service.errors import ApiError
from pantheraml.service.jobs.overview import devices_now, host_now, incidents_now, queue_now, running_now
from pantheraml.service.jobs.reorder import move_before
from pantheraml.service.schemas.overview import MoveJob
from pantheraml.service.store.jobs import leases
from pantheraml.specs.service_api import Devices, Overview, Queue

router = APIRouter(prefix="/v1", tags=["overview"])

_QUEUE = 100
_INCIDENTS = 20


@router.get("/overview")
async def overview(principal: Reader, context: Context) -> Overview:
    """Devices with their health and holders, the queue and why each job waits, running jobs with the time that is
    left, the newest incidents. Jobs of other users are not named."""
    async with context.database.glance() as session:
        queue, queued = await queue_now(session, context, principal, _QUEUE)
        held = await leases(session)
        return Overview(
            version=__version__,
            time=time.time(),
            user=principal.user,
            scopes=[scope for scope in SCOPES if principal.allows(scope)],
            host=host_now(context),
            devices=await devices_now(session, context, principal, held),
            queued=queued,
            queue=queue,
            running=await running_now(session, principal, held),
            incidents=await incidents_now(session, principal, _INCIDENTS),
        )


@router.get("/gpus")
async def gpus(principal: Reader, context: Context) -> Devices:
    """The GPUs or, without any, the CPU slots of this machine."""
    async with context.database.glance() as session:
        data = await devices_now(session, context, principal, await leases(session))
    return Devices(host=host_now(context), data=data)


@router.get("/queue")
async def queue(principal: Reader, context: Context, limit: Annotated[int, Query(ge=1, le=10_000)] = 1000) -> Queue:
    """Waiting jobs, in scheduling order."""
    async with context.database.read() as session:
        entries, queued = await queue_now(session, context, principal, limit)
    return Queue(data=entries, has_more=queued > len(entries))


@router.post("/queue/move", responses={404: {"description": "One of the jobs is not in the queue."}})
async def move(body: MoveJob, request: Request, principal: Admin, context: Context) -> Queue:
    """Move a queued job before another one, or to the end. It keeps this place whatever happens to the other one."""
    async with context.database.write() as session:
        missing = await move_before(session, body.job, body.before)
        if missing is not None:
            raise ApiError(404, f"There is no job {missing} in the queue.", code="not_found")
        audit.record(session, principal, "queue.move", body.job, request)
    await context.dispatcher.reschedule()
    return await queue(principal, context)
