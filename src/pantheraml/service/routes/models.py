"""Models: the base models that may be fine-tuned, and those that jobs have made."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from sqlalchemy import select
from sqlalchemy.orm import load_only

from pantheraml.service.auth import Reader
from pantheraml.service.context import Context
from pantheraml.service.errors import not_found
from pantheraml.service.store.tables import Job

router = APIRouter(prefix="/v1/models", tags=["models"])


def _model(name: str, created: float, owner: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(created), "owned_by": owner}


@router.get("")
async def list_models(principal: Reader, context: Context) -> dict[str, Any]:
    columns = load_only(Job.fine_tuned_model, Job.finished_at, Job.created_at, Job.owner)
    query = select(Job).options(columns).where(Job.fine_tuned_model.is_not(None)).order_by(Job.created_at)
    if principal.owner is not None:
        query = query.where(Job.owner == principal.owner)
    async with context.database.read() as session:
        tuned = (await session.scalars(query)).all()
    data = [_model(base.name, base.created, "pantheraml") for base in context.catalog.models().values()]
    data += [_model(job.fine_tuned_model or "", job.finished_at or job.created_at, job.owner) for job in tuned]
    return {"object": "list", "data": data}


@router.get("/{name:path}")
async def retrieve_model(name: str, principal: Reader, context: Context) -> dict[str, Any]:
    base = context.catalog.models().get(name)
    if base is not None:
        return _model(base.name, base.created, "pantheraml")
    query = select(Job).where(Job.fine_tuned_model == name)
    if principal.owner is not None:
        query = query.where(Job.owner == principal.owner)
    async with context.database.read() as session:
        job = await session.scalar(query.limit(1))
    if job is None:
        raise not_found("model", name, param="model")
    return _model(name, job.finished_at or job.created_at, job.owner)
