"""A folder appears whole or not at all, and the one it replaces stays until then."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import SafetensorError

from pantheraml.base.errors import StorageError
from pantheraml.models.folder import atomic_folder


def test_replaces_the_old_folder(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with atomic_folder(tmp_path / "deep" / "model") as folder:
            (folder / text).write_text(text)
        assert [file.name for file in (tmp_path / "deep" / "model").iterdir()] == [text]
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["model"]


def half_written(file: Path, error: Exception) -> None:
    file.write_text("half")
    raise error


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error: full")])
def test_a_full_disk_leaves_the_old_folder_whole(tmp_path: Path, error: Exception) -> None:
    with atomic_folder(tmp_path / "model") as folder:
        (folder / "old").write_text("old")
    with pytest.raises(StorageError, match="could not be written"), atomic_folder(tmp_path / "model") as folder:
        half_written(folder / "new", error)
    assert (tmp_path / "model" / "old").read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_any_other_error_passes_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "model"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError), atomic_folder(tmp_path / "file" / "model"):
        pass
