"""Rows of vision data sets: what they may hold."""

from __future__ import annotations

from typing import Any

import pytest

from pantheraml.base.errors import DataError
from pantheraml.data.vision_rows import read_conversation, reject_other_media


@pytest.mark.parametrize("kind", ["audio", "video"])
def test_recordings_and_videos_are_refused(kind: str) -> None:
    row: dict[str, Any] = {"messages": [{"role": "user", "content": [{"type": kind, kind: "file"}]}]}
    with pytest.raises(DataError, match=f"{kind}, which is not supported"):
        reject_other_media(row)
    with pytest.raises(DataError, match=f"(?s){kind}, which is not supported.*row 3"):
        read_conversation(row, 3, lambda picture: picture)
    reject_other_media({"messages": [{"role": "user", "content": "audio"}]})
