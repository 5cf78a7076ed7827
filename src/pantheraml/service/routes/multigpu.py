"""`/multigpu`: this machine's GPUs, and training on texts of the request. Mountable bare or under a prefix.

Training is a job like any other: it waits for devices, survives the service, and has a history.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from pantheraml.service import audit
from pantheraml.service.auth import LOCAL_USER, Principal, Reader, Submitter
from pantheraml.service.context import Context, ServiceContext
from pantheraml.service.errors import AnsweringRoute, ApiError, not_found
from pantheraml.service.jobs.gpu_stats import gpu_stats_now
from pantheraml.service.jobs.inventory import card_of
from pantheraml.service.jobs.overview import holders_of_cards
from pantheraml.service.jobs.states import State
from pantheraml.service.jobs.text_training import ended, start_training, training_object
from pantheraml.service.routes import multigpu_control
from pantheraml.service.schemas.multigpu import TrainingRequest, TrainingType
from pantheraml.service.store.devices import disabled_devices
from pantheraml.service.store.jobs import jobs_in, leases, waiting_jobs
from pantheraml.service.store.tables import Event, Job

router = APIRouter(prefix="/multigpu", tags=["multigpu"], route_class=AnsweringRoute)
router.include_router(multigpu_control.router)


@router.get("/health")
async def health(principal: Reader, context: Context) -> dict[str, Any]:
    """Whether jobs can run here, and on what."""
    spec = context.dispatcher.inventory.spec
    return {
        "status": "healthy" if context.dispatcher.is_alive else "unhealthy",
        "gpu_available": bool(spec.gpus),
        "gpu_count": len(spec.gpus),
        "driver": spec.driver,
        "note": spec.note,
        "cpu_count": spec.cpu_count,
    }


@router.get("/stats")
async def stats(principal: Reader, context: Context) -> dict[str, Any]:
    """Every GPU with its memory, utilization, and the job that holds it. None: not reported by the driver."""
    return await gpu_stats_now(context, principal)


@router.get("/gpu/{gpu_id}/stats")
async def gpu_stats(gpu_id: int, principal: Reader, context: Context) -> dict[str, Any]:
    found = [gpu for gpu in (await gpu_stats_now(context, principal))["gpu_info"] if gpu["gpu_id"] == gpu_id]
    if not found:
        raise not_found("GPU", str(gpu_id), param="gpu_id")
    chosen: dict[str, Any] = found[0]
    return chosen


@router.get("/resources/status")
async def resources_status(principal: Reader, context: Context) -> dict[str, Any]:
    """Devices of jobs with their holders, and the length of the queue. Other users' jobs are not named."""
    inventory = context.dispatcher.inventory
    async with context.database.read() as session:
        leased = await leases(session)
        holders = await holders_of_cards(session, principal, leased)
        queued = len(await waiting_jobs(session))
        disabled = await disabled_devices(session)
    devices = []
    for name in inventory.cards:
        there, row = holders.get(name, []), disabled.get(name)
        jobs = [each.job for each in there if each.job is not None]
        state = {"enabled": row is None, "reason": None if row is None else row.reason}
        devices.append({"device": name, "in_use": bool(there), "job": jobs[0] if jobs else None, "jobs": jobs, **state})
    held = inventory.held(leased)
    free = {card_of(name) for name in inventory.devices if name not in held} - {*disabled}
    return {"kind": inventory.kind, "devices": devices, "free": len(free), "queued": queued}


@router.get("/performance/metrics")
async def performance_metrics(principal: Reader, context: Context) -> dict[str, Any]:
    """GPU utilization, and the speed of your running jobs at their newest step. None: unknown."""
    now = await gpu_stats_now(context, principal)
    async with context.database.read() as session:
        running = [job for job in await jobs_in(session, [State.RUNNING]) if principal.owner in (None, job.owner)]
        found = []
        for job in running:
            query = select(Event).where(Event.job_id == job.id, Event.kind == "train.step")
            event = await session.scalar(query.order_by(Event.id.desc()).limit(1))
            figures = {} if event is None else event.data
            names = ("step", "train_loss", "tokens_per_second", "memory_bytes")
            found.append({"training_id": job.id, **{name: figures.get(name) for name in names}})
    shown = ("gpu_id", "gpu_utilization", "memory_utilization", "temperature", "power")
    return {
        "gpu_utilization": _mean([gpu["gpu_utilization"] for gpu in now["gpu_info"]]),
        "memory_utilization": _mean([gpu["memory_utilization"] for gpu in now["gpu_info"]]),
        "gpus": [{name: gpu[name] for name in shown} for gpu in now["gpu_info"]],
        "jobs": found,
        "timestamp": now["timestamp"],
    }


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


@router.get("/training/history")
async def training_history(
    principal: Reader, context: Context, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> dict[str, Any]:
    """Your jobs, newest first."""
    query = select(Job).order_by(Job.created_at.desc(), Job.id.desc()).limit(limit)
    if principal.owner is not None:
        query = query.where(Job.owner == principal.owner)
    async with context.database.read() as session:
        jobs = (await session.scalars(query)).all()
    return {"history": [training_object(job) for job in jobs]}


@router.post("/training/auto")
async def train_auto(
    body: TrainingRequest, request: Request, principal: Submitter, context: Context, wait: bool = False
) -> dict[str, Any]:
    """Train as the planner chooses. `wait=true` answers when the training has ended."""
    return await _train("auto", body, request, principal, context, wait=wait)


@router.post("/training/distributed")
async def train_distributed(
    body: TrainingRequest, request: Request, principal: Submitter, context: Context, wait: bool = False
) -> dict[str, Any]:
    """Train with one process per device."""
    return await _train("distributed", body, request, principal, context, wait=wait)


@router.post("/training/dataparallel")
async def train_dataparallel(
    body: TrainingRequest, request: Request, principal: Submitter, context: Context, wait: bool = False
) -> dict[str, Any]:
    """Train with one process that replicates the model on its GPUs; it needs two of them."""
    return await _train("dataparallel", body, request, principal, context, wait=wait)


async def _train(
    kind: TrainingType,
    body: TrainingRequest,
    request: Request,
    principal: Principal,
    context: ServiceContext,
    *,
    wait: bool,
) -> dict[str, Any]:
    if body.training_type not in (None, kind):
        message = f"training_type is {body.training_type}, but the path says {kind}."
        raise ApiError(422, message, param="training_type")
    if body.user_id is not None and principal.user not in (LOCAL_USER, str(body.user_id)):
        raise ApiError(403, "user_id is not the user of this API key.", param="user_id")

    def record(session: AsyncSession, job_id: str) -> None:
        audit.record(session, principal, "job.create", job_id, request)

    job = await start_training(kind, body, principal, context, record)
    return training_object(await ended(job, context) if wait else job)
