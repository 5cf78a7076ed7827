"""Models that jobs have made: the rows of succeeded jobs, by the name of the model."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from pantheraml.service.store.tables import Job


async def find_tuned(session: AsyncSession, name: str, owner: str | None) -> Job | None:
    """Return the job that made the model; None if there is none, or it belongs to another user. `owner` None: any
    user."""
    query = select(Job).where(Job.fine_tuned_model == name, Job.model_deleted_at.is_(None))
    if owner is not None:
        query = query.where(Job.owner == owner)
    found: Job | None = await session.scalar(query.limit(1))
    return found
