"""Files in the database. Their content is `files/<id>` in the data folder, `<id>.jsonl` for training
data: a path made of the row's id alone."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from pantheraml.service.jobs.states import ENDED
from pantheraml.service.store.tables import File, Job, Upload


async def find_file(session: AsyncSession, file_id: str, owner: str | None) -> File | None:
    """Return the file with this id; None if there is none, or it belongs to another user. `owner` None: any user."""
    file = await session.get(File, file_id)
    return file if file is not None and owner in (None, file.owner) else None


def content_of(file: File, folder: Path) -> Path:
    return folder / (file.id if file.format is None else f"{file.id}.jsonl")


async def bytes_of(session: AsyncSession, owner: str) -> int:
    """Return the bytes of a user's files and pending uploads."""
    files = await session.scalar(select(func.sum(File.bytes)).where(File.owner == owner))
    coming = (Upload.owner == owner) & (Upload.status == "pending")
    announced = await session.scalar(select(func.sum(Upload.bytes)).where(coming))
    return int(files or 0) + int(announced or 0)


async def job_that_reads(session: AsyncSession, file_id: str) -> str | None:
    """Return an unfinished job that trains or evaluates on this file."""
    query = select(Job.id).where((Job.training_file == file_id) | (Job.validation_file == file_id))
    return await session.scalar(query.where(Job.state.not_in([state.value for state in ENDED])).limit(1))
