"""Store training data from the body of a request as a file, like an upload."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from pathlib import Path

from pantheraml.base.errors import DataError
from pantheraml.base.private import open_private
from pantheraml.service.context import ServiceContext
from pantheraml.service.datasets import Dataset, check_jsonl
from pantheraml.service.errors import refusal
from pantheraml.service.ids import new_id
from pantheraml.service.store.files import content_of
from pantheraml.service.store.tables import File


async def add_text_file(
    context: ServiceContext, owner: str, content: bytes, filename: str, *, expires_at: float | None = None
) -> File:
    """Add a file of JSON Lines. ApiError if a row is wrong, or the user's quota does not allow it."""
    async with context.quota.room(owner, len(content)):
        return await _add(context, owner, content, filename, expires_at)


async def _add(context: ServiceContext, owner: str, content: bytes, filename: str, expires_at: float | None) -> File:
    file = File(
        id=new_id("file"),
        owner=owner,
        purpose="fine-tune",
        filename=filename,
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        format="text",
        created_at=time.time(),
        expires_at=expires_at,
    )
    path = content_of(file, context.settings.files)
    try:
        dataset = await asyncio.to_thread(_write, path, content)
        file.rows, file.format = dataset.rows, dataset.format
        async with context.database.write() as session:
            session.add(file)
    except BaseException as err:
        path.unlink(missing_ok=True)
        if isinstance(err, DataError):
            raise refusal(err, param="dataset_config.texts") from err
        raise
    return file


async def remove_text_file(context: ServiceContext, file: File) -> None:
    """Remove a file that is not in use yet."""
    async with context.database.write() as session:
        await session.delete(await session.get_one(File, file.id))
    content_of(file, context.settings.files).unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> Dataset:
    with open(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as output:
        output.write(content)
    return check_jsonl(path)
