"""Rows of vision data sets: what they may hold."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import EpsImagePlugin, Image

from pantheraml.base.errors import ConfigError, DataError
from pantheraml.data.vision_rows import read_conversation, reject_other_media


@pytest.mark.parametrize("kind", ["audio", "video"])
def test_recordings_and_videos_are_refused(kind: str) -> None:
    row: dict[str, Any] = {"messages": [{"role": "user", "content": [{"type": kind, kind: "file"}]}]}
    with pytest.raises(DataError, match=f"{kind}, which is not supported"):
        reject_other_media(row)
    with pytest.raises(DataError, match=f"(?s){kind}, which is not supported.*row 3"):
        read_conversation(row, 3, lambda picture: picture)
    reject_other_media({"messages": [{"role": "user", "content": "audio"}]})


def row_with(image: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image", "image": image}]}]}


def read(image: Any) -> list[Image.Image]:
    return read_conversation(row_with(image), 0, lambda picture: picture).images


def test_images_are_read_from_allowed_folders_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set of someone else could name any file of its reader."""
    (tmp_path / "data").mkdir()
    for folder in (tmp_path, tmp_path / "data"):
        Image.new("RGB", (2, 2)).save(folder / "a.png")
    monkeypatch.setenv("PANTHERAML_ALLOWED_ROOTS", str(tmp_path / "data"))
    assert [image.size for image in read(str(tmp_path / "data" / "a.png"))] == [(2, 2)]
    for path in (str(tmp_path / "a.png"), f"file://{tmp_path}/a.png", {"path": str(tmp_path / "data" / "../a.png")}):
        with pytest.raises(ConfigError, match="outside the folders allowed"):
            read(path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(DataError, match="it is not a file"):
        read(str(tmp_path / "pipe.png"))


def test_no_image_runs_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow would have Ghostscript run what an EPS file says."""
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *arguments, **options: pytest.fail("started"))
    picture = io.BytesIO()
    Image.new("RGB", (2, 2)).save(picture, "EPS")
    (tmp_path / "a.png").write_bytes(picture.getvalue())
    for source in (str(tmp_path / "a.png"), {"bytes": picture.getvalue()}):
        with pytest.raises(DataError, match="it is not an image"):
            read(source)
