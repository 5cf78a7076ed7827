"""OpenAI's files: upload, list, retrieve, content, delete."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from pantheraml.service import audit
from pantheraml.service.accept_file import check_purpose, keep_file, new_file
from pantheraml.service.auth import Principal, Reader, Submitter
from pantheraml.service.context import Context, ServiceContext
from pantheraml.service.errors import ApiError, not_found
from pantheraml.service.multipart import received
from pantheraml.service.schemas.files import file_object, parse_expiry, refuse_unknown
from pantheraml.service.store.files import content_of, find_file, job_that_reads
from pantheraml.service.store.pages import fetch_page
from pantheraml.service.store.tables import File
from pantheraml.service.stored import StoredFile

_FORM_BYTES = 1 << 20
"""Bytes that a form may have around its file."""

router = APIRouter(prefix="/v1/files", tags=["files"])


@router.post("")
async def create_file(request: Request, principal: Submitter, context: Context) -> dict[str, Any]:
    """Upload a file as multipart/form-data. Training data is checked row by row before it is accepted."""
    with context.quota.body(principal.user):
        return file_object(await _received_file(request, principal, context))


async def _received_file(request: Request, principal: Principal, context: ServiceContext) -> File:
    length = request.headers.get("content-length")
    announced = None if length is None else int(length)
    async with (
        context.quota.room(principal.user, announced, around=_FORM_BYTES) as limit,
        received(request, context.settings.incoming, file_field="file", limit=limit) as upload,
    ):
        refuse_unknown(upload.fields)
        file = await new_file(
            upload.path,
            principal.user,
            purpose=check_purpose(upload.fields.get("purpose")),
            filename=upload.filename or "upload",
            size=upload.size,
            sha256=upload.sha256,
            expires_at=parse_expiry(upload.fields, time.time()),
        )

        async def record(session: AsyncSession) -> None:
            audit.record(session, principal, "file.create", file.id, request)

        await keep_file(context, upload.path, file, record)
    return file


@router.get("")
async def list_files(
    principal: Reader,
    context: Context,
    after: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: Annotated[str | None, Query(max_length=32)] = None,
) -> dict[str, Any]:
    async with context.database.read() as session:
        query = select(File)
        if principal.owner is not None:
            query = query.where(File.owner == principal.owner)
        if purpose is not None:
            query = query.where(File.purpose == purpose)
        cursor = None if after is None else await _existing(context, principal, after, param="after")
        page = await fetch_page(session, query, File, limit=limit, cursor=cursor, order=order)
    return page.as_list(file_object)


@router.get("/{file_id}")
async def retrieve_file(file_id: str, principal: Reader, context: Context) -> dict[str, Any]:
    return file_object(await _existing(context, principal, file_id))


@router.get("/{file_id}/content", response_class=StoredFile)
async def file_content(file_id: str, principal: Reader, context: Context) -> StoredFile:
    """The content; ranges of bytes are possible."""
    file = await _existing(context, principal, file_id)
    path = content_of(file, context.settings.files)
    if not path.is_file():
        raise ApiError(410, "The content of this file is gone.", code="gone")
    return StoredFile(path, media_type="application/octet-stream", filename=file.filename)


@router.delete("/{file_id}")
async def delete_file(file_id: str, request: Request, principal: Submitter, context: Context) -> dict[str, Any]:
    file = await _existing(context, principal, file_id)
    async with context.database.write() as session:
        job = await job_that_reads(session, file.id)
        if job is not None:
            raise ApiError(400, f"The job {job} still uses this file.", param="file_id", code="file_in_use")
        await session.delete(await session.get_one(File, file.id))
        audit.record(session, principal, "file.delete", file.id, request)
    content_of(file, context.settings.files).unlink(missing_ok=True)
    return {"id": file.id, "object": "file", "deleted": True}


async def _existing(context: ServiceContext, principal: Principal, file_id: str, *, param: str = "file_id") -> File:
    async with context.database.read() as session:
        file = await find_file(session, file_id, principal.owner)
    if file is None:
        raise not_found("file", file_id, param=param)
    return file
