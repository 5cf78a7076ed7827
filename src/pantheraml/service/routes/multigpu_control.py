"""`/multigpu`: settings of a user's trainings, devices that jobs may not have, tests of devices, recommendations."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Request
from sqlalchemy.ext.asyncio import AsyncSession

from pantheraml.service import audit
from pantheraml.service.auth import Admin, Reader, Submitter
from pantheraml.service.context import Context
from pantheraml.service.errors import AnsweringRoute, not_found
from pantheraml.service.jobs.device_test import result_of_test, start_test
from pantheraml.service.jobs.recommendations import recommend
from pantheraml.service.jobs.submit import require_gpus
from pantheraml.service.jobs.text_training import check_batch_size, ended
from pantheraml.service.schemas.multigpu import DeviceTest, ResourceRequest, TrainingConfig
from pantheraml.service.store.devices import disable, disabled_devices, enable, settings_of, store_settings
from pantheraml.specs.gpu_config import GPUConfig

router = APIRouter(route_class=AnsweringRoute)


@router.get("/config")
async def get_config(principal: Reader, context: Context) -> GPUConfig:
    """Your settings, or the defaults. Without settings, the planner chooses for each training."""
    async with context.database.read() as session:
        row = await settings_of(session, principal.user)
    return GPUConfig(**(row.gpus or {}))


@router.post("/config")
async def set_config(body: GPUConfig, request: Request, principal: Submitter, context: Context) -> GPUConfig:
    """Set how your later trainings under `/multigpu` use GPUs. Omitted fields have their defaults."""
    require_gpus(body.gpu_ids, context.dispatcher.inventory.spec)
    check_batch_size(body)
    async with context.database.write() as session:
        await store_settings(session, principal.user, gpus=body.model_dump())
        audit.record(session, principal, "multigpu.config", principal.user, request)
    return body


@router.get("/training/config")
async def get_training_config(principal: Reader, context: Context) -> TrainingConfig:
    async with context.database.read() as session:
        row = await settings_of(session, principal.user)
    return TrainingConfig(**(row.training or {}))


@router.post("/training/config")
async def set_training_config(
    body: TrainingConfig, request: Request, principal: Submitter, context: Context
) -> TrainingConfig:
    """Set the default `training_config` of your later trainings."""
    async with context.database.write() as session:
        await store_settings(session, principal.user, training=body.model_dump(exclude_unset=True))
        audit.record(session, principal, "multigpu.training_config", principal.user, request)
    return body


@router.post("/resources/manage")
async def manage_resources(
    body: ResourceRequest, request: Request, principal: Admin, context: Context
) -> dict[str, Any]:
    """Take devices out of use, or back into use. Jobs that hold them continue; waiting ones get others."""
    known = context.dispatcher.inventory.cards
    for name in body.names:
        if name not in known:
            raise not_found("device", name, param="gpu_ids" if name.startswith("gpu:") else "devices")
    async with context.database.write() as session:
        if body.action == "disable":
            await disable(session, body.names, principal.user, body.reason)
        else:
            await enable(session, body.names)
        for name in body.names:
            audit.record(session, principal, f"device.{body.action}", name, request)
        disabled = await disabled_devices(session)
    context.dispatcher.wake()
    return {
        "action": body.action,
        "devices": [{"device": name, "enabled": name not in disabled} for name in known],
    }


@router.post("/gpu/test")
async def gpu_test(
    request: Request,
    principal: Submitter,
    context: Context,
    body: Annotated[DeviceTest | None, Body()] = None,
    wait: bool = True,
) -> dict[str, Any]:
    """Train a tiny model for two steps, in a job. `wait=false` returns at once."""

    def record(session: AsyncSession, job_id: str) -> None:
        audit.record(session, principal, "gpu.test", job_id, request)

    job = await start_test(body or DeviceTest(), principal, context, record)
    return await result_of_test(await ended(job, context) if wait else job, context)


@router.get("/gpu/recommendations")
async def gpu_recommendations(
    principal: Reader, context: Context, model_name: Annotated[str | None, Query(max_length=512)] = None
) -> dict[str, Any]:
    """Which devices to use and how, each with its reason; for a model, also what the planner would choose."""
    return await recommend(context, model_name)
