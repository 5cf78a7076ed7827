from __future__ import annotations

import resource
from pathlib import Path

import pytest

from pantheraml.base.errors import StorageError
from pantheraml.base.folders import committed_folder, write_text


def test_folder_appears_only_when_complete(tmp_path: Path) -> None:
    final = tmp_path / "a" / "b"
    with committed_folder(final) as folder:
        (folder / "x").write_text("1")
        assert not final.exists()
    assert (final / "x").read_text() == "1"
    assert [p.name for p in final.parent.iterdir()] == ["b"]


def test_error_keeps_old_folder_and_leaves_no_scratch(tmp_path: Path) -> None:
    final = tmp_path / "b"
    with committed_folder(final) as folder:
        (folder / "x").write_text("old")
    with pytest.raises(KeyError), committed_folder(final) as folder:
        (folder / "x").write_text("new")
        raise KeyError
    assert (final / "x").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_full_disk_is_a_storage_error_and_keeps_old_content(tmp_path: Path) -> None:
    final, text = tmp_path / "b", tmp_path / "t.json"
    with committed_folder(final) as folder:
        (folder / "x").write_text("old")
    write_text(text, "old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(StorageError, match="the disk is full"), committed_folder(final) as folder:
            (folder / "x").write_bytes(b"0" * 5000)
        with pytest.raises(StorageError, match="the disk is full"):
            write_text(text, "0" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (final / "x").read_text() == "old"
    assert text.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "t.json"]
