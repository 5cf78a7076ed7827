"""Models: the base models that may be fine-tuned, and those that jobs have made."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import load_only

from pantheraml.service import audit
from pantheraml.service.auth import Reader, Submitter
from pantheraml.service.context import Context
from pantheraml.service.errors import ApiError, not_found
from pantheraml.service.jobs.delete_model import delete_model as delete_weights
from pantheraml.service.store.models import find_tuned
from pantheraml.service.store.tables import Job

router = APIRouter(prefix="/v1/models", tags=["models"])


def _model(name: str, created: float, owner: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(created), "owned_by": owner}


@router.get("")
async def list_models(principal: Reader, context: Context) -> dict[str, Any]:
    columns = load_only(Job.fine_tuned_model, Job.finished_at, Job.created_at, Job.owner)
    query = select(Job).options(columns).where(Job.fine_tuned_model.is_not(None), Job.model_deleted_at.is_(None))
    if principal.owner is not None:
        query = query.where(Job.owner == principal.owner)
    async with context.database.glance() as session:
        tuned = (await session.scalars(query.order_by(Job.created_at))).all()
    data = [_model(base.name, base.created, "pantheraml") for base in context.catalog.models().values()]
    data += [_model(job.fine_tuned_model or "", job.finished_at or job.created_at, job.owner) for job in tuned]
    return {"object": "list", "data": data}


@router.get("/{name:path}")
async def retrieve_model(name: str, principal: Reader, context: Context) -> dict[str, Any]:
    base = context.catalog.models().get(name)
    if base is not None:
        return _model(base.name, base.created, "pantheraml")
    async with context.database.glance() as session:
        job = await find_tuned(session, name, principal.owner)
    if job is None:
        raise not_found("model", name, param="model")
    return _model(name, job.finished_at or job.created_at, job.owner)


@router.delete("/{name:path}")
async def delete_model(name: str, request: Request, principal: Submitter, context: Context) -> dict[str, Any]:
    """Delete a tuned model: its weights, checkpoints and `adapter.tar`. Its job stays, with events and metrics."""
    if name in context.catalog.models():
        raise ApiError(403, f"`{name}` is a base model; the operator removes it from the models folder.", param="model")
    async with context.database.glance() as session:
        job = await find_tuned(session, name, principal.owner)
    if job is None:
        raise not_found("model", name, param="model")

    def record(session: AsyncSession) -> None:
        audit.record(session, principal, "model.delete", job.id, request)

    await delete_weights(context.database, context.settings, job, record)
    context.quota.measure_again(job.owner)
    return {"id": name, "object": "model", "deleted": True}
