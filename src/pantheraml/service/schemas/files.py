"""A file in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pantheraml.service.errors import ApiError
from pantheraml.service.store.tables import File

SHORTEST_SECONDS, LONGEST_SECONDS = 3600, 30 * 24 * 3600


def file_object(file: File) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": int(file.created_at),
        "expires_at": None if file.expires_at is None else int(file.expires_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
        "rows": file.rows,
        "sha256": file.sha256,
    }


def parse_expiry(fields: Mapping[str, str], now: float) -> float | None:
    """Return the expiry time set by `expires_after[anchor]` and `expires_after[seconds]` of an upload; None: never."""
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise ApiError(400, "`expires_after[anchor]` must be `created_at`.", param="expires_after[anchor]")
    if seconds is None or not seconds.isdigit() or not SHORTEST_SECONDS <= int(seconds) <= LONGEST_SECONDS:
        message = f"`expires_after[seconds]` must be between {SHORTEST_SECONDS} and {LONGEST_SECONDS}."
        raise ApiError(400, message, param="expires_after[seconds]")
    return now + int(seconds)
