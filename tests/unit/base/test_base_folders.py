from __future__ import annotations

import resource
import tempfile
from pathlib import Path

import pytest

from pantheraml.base.errors import ConfigError, StorageError, WorkerError
from pantheraml.base.folders import added_files, committed_folder, no_scratch_left, working_folder, write_text


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


def test_files_are_added_without_writing_beside_the_folder(tmp_path: Path) -> None:
    """It may be where a disk is mounted: nothing can be renamed into it from outside, nor written there."""
    final = tmp_path / "disk"
    final.mkdir()
    (final / "old-1").write_text("goes")
    (final / "mine").write_text("stays")
    with added_files(final, replaces=("old-*",)) as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "x").write_text("1")
        assert [path.name for path in tmp_path.iterdir()] == ["disk"]
    assert sorted(str(path.relative_to(final)) for path in final.rglob("*")) == ["deep", "deep/x", "mine"]
    with pytest.raises(KeyError), no_scratch_left(final / "a.gguf"), added_files(final, name="a.gguf") as folder:
        folder.rename(killed := final / f"{folder.name[:-1]}{'1' if folder.name[-1] == '0' else '0'}")
        raise KeyError
    assert not killed.exists(), "what a killed process left of that file"


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


def test_a_working_folder_stays_only_if_an_error_points_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with working_folder("verify") as folder:
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
    for err in (ConfigError("wrong", where="a.yaml"), KeyError(), KeyboardInterrupt()):
        with pytest.raises(type(err)), working_folder("verify"):
            raise err
    assert not list(tmp_path.iterdir())
    with pytest.raises(WorkerError), working_folder("verify") as folder:
        raise WorkerError("failed", where=str(folder / "worker.log"))
    assert list(tmp_path.iterdir()) == [folder]
