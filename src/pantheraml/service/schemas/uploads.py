"""Request bodies of multipart uploads, and uploads in OpenAI's form."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pantheraml.service.schemas.files import LONGEST_SECONDS, SHORTEST_SECONDS, file_object
from pantheraml.service.store.tables import File, Upload, UploadPart

MOST_PARTS = 10_000


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ExpiresAfter(_Body):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=SHORTEST_SECONDS, le=LONGEST_SECONDS)]


class CreateUpload(_Body):
    bytes: Annotated[int, Field(ge=1, lt=1 << 62)]
    """Size of the whole file."""
    filename: Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[^/\\\x00]+$")]
    mime_type: Annotated[str, Field(max_length=255)]
    purpose: Annotated[str, Field(max_length=32)]
    expires_after: ExpiresAfter | None = None
    """Expiry of the completed file."""


class CompleteUpload(_Body):
    part_ids: Annotated[list[Annotated[str, Field(max_length=64)]], Field(min_length=1, max_length=MOST_PARTS)]
    """Ids of the parts, in the order of their content."""
    md5: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{32}$")] | None = None
    """MD5 of the whole file."""


def upload_object(upload: Upload, file: File | None = None) -> dict[str, Any]:
    return {
        "id": upload.id,
        "object": "upload",
        "bytes": upload.bytes,
        "created_at": int(upload.created_at),
        "expires_at": int(upload.expires_at),
        "filename": upload.filename,
        "purpose": upload.purpose,
        "status": upload.status,
        "file": None if file is None else file_object(file),
    }


def part_object(part: UploadPart) -> dict[str, Any]:
    created = int(part.created_at)
    return {"id": part.id, "object": "upload.part", "created_at": created, "upload_id": part.upload_id}
