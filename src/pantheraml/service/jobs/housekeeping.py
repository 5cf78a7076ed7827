"""Remove expired files, and content without a database row, which a killed service may leave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path

from sqlalchemy import delete, select

from pantheraml.service.jobs.delete_model import finish_deletions
from pantheraml.service.jobs.retention import forget_old
from pantheraml.service.settings import Settings
from pantheraml.service.store.database import Database
from pantheraml.service.store.files import content_of, job_that_reads
from pantheraml.service.store.tables import File, Upload, UploadPart, WebhookDelivery

EVERY_SECONDS = 60.0
_YOUNG_SECONDS = 3600.0
"""Content is written before its row, so younger content may still get one."""

_TOLD_SECONDS = 7 * 86_400.0
"""How long finished deliveries are kept, for inspection."""


async def keep_house(database: Database, settings: Settings) -> None:
    await tidy(database, settings.files)
    await tidy_uploads(database, settings.uploads)
    await finish_deletions(database, settings)
    await forget_old(database, settings)
    async with database.write() as session:
        told = WebhookDelivery.next_at.is_(None) & (WebhookDelivery.created_at < time.time() - _TOLD_SECONDS)
        await session.execute(delete(WebhookDelivery).where(told))


async def tidy_uploads(database: Database, folder: Path) -> None:
    """Expire unfinished uploads, and remove parts without a row."""
    async with database.write() as session:
        old = (Upload.status == "pending") & (Upload.expires_at <= time.time())
        for upload in (await session.scalars(select(Upload).where(old))).all():
            upload.status = "expired"
        ended = select(Upload.id).where(Upload.status != "pending")
        gone = delete(UploadPart).where(UploadPart.upload_id.in_(ended)).returning(UploadPart.id)
        expired = (await session.scalars(gone)).all()
    async with database.read() as session:
        known = set((await session.scalars(select(UploadPart.id))).all())
    await asyncio.to_thread(_remove, folder, known, expired)


async def tidy(database: Database, folder: Path) -> list[str]:
    """Clean up the folder of files. Return the ids of expired files; files of unfinished jobs stay."""
    expired: list[File] = []
    async with database.write() as session:
        for file in (await session.scalars(select(File).where(File.expires_at <= time.time()))).all():
            if await job_that_reads(session, file.id) is None:
                await session.delete(file)
                expired.append(file)
    async with database.read() as session:
        known = {content_of(file, folder).name for file in (await session.scalars(select(File))).all()}
    await asyncio.to_thread(_remove, folder, known, [content_of(file, folder).name for file in expired])
    return [file.id for file in expired]


def _remove(folder: Path, known: set[str], expired: Iterable[str]) -> None:
    for name in expired:
        (folder / name).unlink(missing_ok=True)
    for path in folder.iterdir():
        if path.name not in known and time.time() - path.stat().st_mtime > _YOUNG_SECONDS:
            path.unlink(missing_ok=True)
