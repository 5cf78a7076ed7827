"""A file in OpenAI's form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pantheraml.service.errors import ApiError
from pantheraml.service.store.tables import File

SHORTEST_SECONDS, LONGEST_SECONDS = 3600, 30 * 24 * 3600
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = ("file", "purpose", _ANCHOR, _SECONDS)


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
    anchor, text = fields.get(_ANCHOR), fields.get(_SECONDS)
    if anchor is None and text is None:
        return None
    if anchor != "created_at":
        raise ApiError(400, f"`{_ANCHOR}` must be `created_at`.", param=_ANCHOR)
    seconds = int(text) if re.fullmatch("[0-9]{1,9}", text or "") and text else 0
    if not SHORTEST_SECONDS <= seconds <= LONGEST_SECONDS:
        raise ApiError(400, f"`{_SECONDS}` must be between {SHORTEST_SECONDS} and {LONGEST_SECONDS}.", param=_SECONDS)
    return now + seconds


def refuse_unknown(fields: Mapping[str, str]) -> None:
    """ApiError for a field of a form that nothing reads, such as `expires_after` with a JSON object in it."""
    for name in fields:
        if name not in _FIELDS:
            raise ApiError(
                400, f"The form has the field `{name[:100]}`; known are {', '.join(_FIELDS)}.", param=name[:100]
            )
