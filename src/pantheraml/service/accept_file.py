"""Turn an upload into a file of the service: check purpose and rows, move the content, add the database row."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncSession

from pantheraml.base.errors import DataError
from pantheraml.service.context import ServiceContext
from pantheraml.service.datasets import Dataset, WrongRowsError, check_jsonl
from pantheraml.service.errors import ApiError, refusal
from pantheraml.service.ids import new_id
from pantheraml.service.store.files import content_of
from pantheraml.service.store.tables import File

PURPOSES = ("fine-tune", "user_data")


def check_purpose(purpose: str | None) -> str:
    if purpose not in PURPOSES:
        raise ApiError(400, "`purpose` must be `fine-tune` or `user_data`.", param="purpose")
    return purpose


async def new_file(
    path: Path, owner: str, *, purpose: str, filename: str, size: int, sha256: str, expires_at: float | None
) -> File:
    """The row of the file at `path`. ApiError if it is training data with an invalid row."""
    dataset = await _checked(path) if purpose == "fine-tune" else None
    return File(
        id=new_id("file"),
        owner=owner,
        purpose=purpose,
        filename=filename,
        bytes=size,
        sha256=sha256,
        rows=None if dataset is None else dataset.rows,
        format=None if dataset is None else dataset.format,
        created_at=time.time(),
        expires_at=expires_at,
    )


async def keep_file(
    context: ServiceContext, path: Path, file: File, record: Callable[[AsyncSession], Awaitable[None]]
) -> None:
    """Move the content to its place and add the row; `record` adds to the same transaction, and may raise."""
    place = content_of(file, context.settings.files)
    path.rename(place)
    try:
        async with context.database.write() as session:
            session.add(file)
            await record(session)
    except BaseException:
        place.unlink(missing_ok=True)
        raise


async def _checked(path: Path) -> Dataset:
    try:
        return await asyncio.to_thread(check_jsonl, path)
    except DataError as err:
        error = refusal(err, param="file")
        error.code = "invalid_file_format"
        error.rows = err.rows if isinstance(err, WrongRowsError) else []
        raise error from err
