"""OpenAI's uploads: a file in parts of up to 64 MiB, in any order, put together at the end.

An upload that is not completed within an hour is removed with its parts.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from sqlalchemy import delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from pantheraml.base.private import open_private
from pantheraml.service import audit
from pantheraml.service.accept_file import check_purpose, keep_file, new_file
from pantheraml.service.auth import Principal, Submitter
from pantheraml.service.context import Context, ServiceContext
from pantheraml.service.errors import ApiError, not_found
from pantheraml.service.ids import new_id
from pantheraml.service.multipart import ReceivedForm, received, too_large
from pantheraml.service.schemas.uploads import MOST_PARTS, CompleteUpload, CreateUpload, part_object, upload_object
from pantheraml.service.store.tables import File, Upload, UploadPart

router = APIRouter(prefix="/v1/uploads", tags=["uploads"])

PART_BYTES = 64 << 20
LIFETIME_SECONDS = 3600.0
MOST_PENDING = 100
"""Uploads of one user that are not complete."""
_BLOCK_BYTES = 1 << 20


@router.post("")
async def create_upload(body: CreateUpload, request: Request, principal: Submitter, context: Context) -> dict[str, Any]:
    """Announce a file; its bytes count against the quota from now on."""
    now = time.time()
    check_purpose(body.purpose)
    upload = Upload(
        id=new_id("upload"),
        owner=principal.user,
        status="pending",
        purpose=body.purpose,
        filename=body.filename,
        bytes=body.bytes,
        created_at=now,
        expires_at=now + LIFETIME_SECONDS,
        file_lifetime=None if body.expires_after is None else body.expires_after.seconds,
        file_id=None,
    )
    async with context.quota.room(principal.user, body.bytes), context.database.write() as session:
        mine = (Upload.owner == principal.user) & (Upload.status == "pending")
        if (await session.scalar(select(func.count()).select_from(Upload).where(mine)) or 0) >= MOST_PENDING:
            raise ApiError(403, f"You have {MOST_PENDING} unfinished uploads; cancel some.", code="quota_exceeded")
        session.add(upload)
        audit.record(session, principal, "upload.create", upload.id, request)
    return upload_object(upload)


@router.post("/{upload_id}/parts")
async def add_part(upload_id: str, request: Request, principal: Submitter, context: Context) -> dict[str, Any]:
    """Add a part (form field `data`); several may be sent at a time."""
    upload = await _pending(context, principal, upload_id)
    announced = request.headers.get("content-length")
    if announced is not None and int(announced) > PART_BYTES + (1 << 20):  # for the form around it
        raise too_large(PART_BYTES)
    incoming = context.settings.incoming
    with context.quota.body(principal.user):
        async with received(request, incoming, file_field="data", limit=PART_BYTES) as form:
            return part_object(await _keep_part(form, upload, request, principal, context))


async def _keep_part(
    form: ReceivedForm, upload: Upload, request: Request, principal: Principal, context: ServiceContext
) -> UploadPart:
    part = UploadPart(id=new_id("part"), upload_id=upload.id, bytes=form.size, created_at=time.time())
    place = context.settings.uploads / part.id
    form.path.rename(place)
    try:
        async with context.database.write() as session:
            await _still_pending(session, upload.id)
            counted = select(func.count(), func.sum(UploadPart.bytes)).where(UploadPart.upload_id == upload.id)
            count, total = (await session.execute(counted)).one()
            # one part may have been sent twice
            if count >= MOST_PARTS or (total or 0) + part.bytes > upload.bytes + PART_BYTES:
                raise ApiError(400, f"The parts are more than the {upload.bytes:,} bytes announced.", param="data")
            session.add(part)
            audit.record(session, principal, "upload.part", part.id, request)
    except BaseException:
        place.unlink(missing_ok=True)
        raise
    return part


@router.post("/{upload_id}/complete")
async def complete_upload(
    upload_id: str, body: CompleteUpload, request: Request, principal: Submitter, context: Context
) -> dict[str, Any]:
    """Assemble the parts. If that fails, they stay, and the call can be repeated."""
    upload = await _existing(context, principal, upload_id)
    if upload.status == "completed":  # a repeated request whose first answer was lost
        async with context.database.read() as session:
            return upload_object(upload, await session.get(File, upload.file_id))
    _require_pending(upload)
    parts = await _chosen_parts(context, upload, body.part_ids)
    whole = context.settings.incoming / secrets.token_hex(16)
    try:
        digests = await asyncio.to_thread(_join, [context.settings.uploads / part.id for part in parts], whole)
        if body.md5 is not None and digests.md5 != body.md5.lower():
            raise ApiError(400, f"The parts have the MD5 {digests.md5}, not {body.md5}.", param="md5", code="md5")
        file = await new_file(
            whole,
            upload.owner,
            purpose=upload.purpose,
            filename=upload.filename,
            size=upload.bytes,
            sha256=digests.sha256,
            expires_at=None if upload.file_lifetime is None else time.time() + upload.file_lifetime,
        )

        removed: list[str] = []

        async def record(session: AsyncSession) -> None:
            removed[:] = await _end(session, upload, "completed", file_id=file.id)
            audit.record(session, principal, "upload.complete", upload.id, request)

        await keep_file(context, whole, file, record)
    finally:
        whole.unlink(missing_ok=True)
    _remove_parts(context, removed)
    return upload_object(upload, file)


@router.post("/{upload_id}/cancel")
async def cancel_upload(upload_id: str, request: Request, principal: Submitter, context: Context) -> dict[str, Any]:
    upload = await _existing(context, principal, upload_id)
    if upload.status != "cancelled":
        _require_pending(upload)
        async with context.database.write() as session:
            removed = await _end(session, upload, "cancelled")
            audit.record(session, principal, "upload.cancel", upload.id, request)
        _remove_parts(context, removed)
    return upload_object(upload)


async def _existing(context: ServiceContext, principal: Principal, upload_id: str) -> Upload:
    async with context.database.read() as session:
        upload = await session.get(Upload, upload_id)
    if upload is None or principal.owner not in (None, upload.owner):
        raise not_found("upload", upload_id, param="upload_id")
    return upload


async def _pending(context: ServiceContext, principal: Principal, upload_id: str) -> Upload:
    upload = await _existing(context, principal, upload_id)
    _require_pending(upload)
    return upload


def _require_pending(upload: Upload) -> None:
    status = "expired" if upload.status == "pending" and upload.expires_at <= time.time() else upload.status
    if status != "pending":
        raise ApiError(400, f"The upload is {status}.", param="upload_id", code=f"upload_{status}")


async def _still_pending(session: AsyncSession, upload_id: str) -> None:
    """Lock the upload's status until the transaction ends."""
    _require_pending(await session.get_one(Upload, upload_id, with_for_update=True))


async def _end(session: AsyncSession, upload: Upload, status: str, **changes: Any) -> list[str]:
    """Set a pending upload's final status, within the caller's transaction. Return the ids of its parts, which are then
    no longer needed."""
    pending = (Upload.id == upload.id) & (Upload.status == "pending")
    result = await session.execute(update(Upload).where(pending).values(status=status, **changes))
    if result.rowcount != 1:  # type: ignore[attr-defined]
        raise ApiError(400, "The upload was completed or cancelled meanwhile.", param="upload_id", code="upload_ended")
    removed = delete(UploadPart).where(UploadPart.upload_id == upload.id).returning(UploadPart.id)
    upload.status = status
    return list((await session.scalars(removed)).all())


async def _chosen_parts(context: ServiceContext, upload: Upload, part_ids: Sequence[str]) -> list[UploadPart]:
    async with context.database.read() as session:
        query = select(UploadPart).where(UploadPart.upload_id == upload.id)
        known = {part.id: part for part in (await session.scalars(query)).all()}
    missing = [name for name in part_ids if name not in known]
    if missing or len(set(part_ids)) != len(part_ids):
        problem = f"{missing[0]} is not a part of this upload" if missing else "a part is named twice"
        raise ApiError(400, f"`part_ids`: {problem}.", param="part_ids")
    parts = [known[name] for name in part_ids]
    total = sum(part.bytes for part in parts)
    if total != upload.bytes:
        message = f"The parts have {total:,} bytes; {upload.bytes:,} were announced."
        raise ApiError(400, message, param="part_ids", code="wrong_size")
    return parts


def _remove_parts(context: ServiceContext, part_ids: Sequence[str]) -> None:
    for name in part_ids:
        (context.settings.uploads / name).unlink(missing_ok=True)


@dataclass(frozen=True)
class _Digests:
    md5: str
    sha256: str


def _join(parts: Sequence[Path], whole: Path) -> _Digests:
    md5, sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()
    with open(open_private(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as output:
        for path in parts:
            with open(path, "rb") as part:
                while block := part.read(_BLOCK_BYTES):
                    md5.update(block)
                    sha256.update(block)
                    output.write(block)
        output.flush()
        os.fsync(output.fileno())
    return _Digests(md5.hexdigest(), sha256.hexdigest())
