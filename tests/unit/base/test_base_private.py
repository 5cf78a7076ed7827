"""Run folders and caches are private: other users cannot lock files, plant symlinks or redirect writes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pantheraml.base import event_stream, private
from pantheraml.base.errors import RunDirectoryError, StorageError
from pantheraml.base.event_stream import EventWriter
from pantheraml.base.events import Notice
from pantheraml.base.folders import committed_folder, no_scratch_left, write_text
from pantheraml.base.private import lock, open_private, private_files, private_folder
from pantheraml.data.cache import cache_folder, fingerprint_lock
from pantheraml.specs.run_dir import CONTENTS, RunDir
from tests.event_log import raw_events
from tests.harness import silent

OTHER_UID = 65_534


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@contextlib.contextmanager
def umask(value: int) -> Iterator[None]:
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.seed("S4-138")
@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_run_folder_is_private_whatever_the_umask(mask: int, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "deep" / "run")
    with umask(mask):
        with run.claim(resume=False, overwrite=False) as replacement, EventWriter(run.path) as emit:
            replacement.commit()
            emit(Notice(message="hello"))
            write_text(run.config_file, "text")
        with committed_folder(run.path / "checkpoints", private=True):
            pass
    assert mode(run.path) == mode(run.checkpoints) == 0o700
    assert {mode(run.path / name) for name in ("run.lock", "events.jsonl", "config.yaml")} == {0o600}


def test_resuming_an_older_run_folder_makes_it_private(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir(mode=0o755)
    for name in ("run.lock", "events.jsonl"):
        (run.path / name).touch(mode=0o644)
    with run.claim(resume=True, overwrite=False), EventWriter(run.path) as emit:
        emit(Notice(message="hello"))
    assert mode(run.path) == 0o700
    assert {mode(run.path / name) for name in ("run.lock", "events.jsonl")} == {0o600}


def test_private_files_and_exported_folders_have_different_modes(tmp_path: Path) -> None:
    with umask(0o022):
        with private_files():
            (tmp_path / "a").touch()
        with committed_folder(tmp_path / "exported") as folder:
            (folder / "b").touch(mode=0o600)  # as safetensors does
    assert mode(tmp_path / "a") == 0o600
    assert mode(tmp_path / "exported") == 0o755
    assert mode(tmp_path / "exported" / "b") == 0o644


def test_cache_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PANTHERAML_CACHE", str(tmp_path / "cache"))
    named = tmp_path / "named"
    named.mkdir(mode=0o755)
    with umask(0o022):
        for folder in (cache_folder(None), named):
            with fingerprint_lock(folder, "0123", silent), committed_folder(folder / "0123", private=True):
                pass
    assert mode(tmp_path / "cache" / "data") == 0o700
    assert mode(named) == 0o755, "a folder named by the user may hold other files"
    for folder in (cache_folder(None), named):
        assert mode(folder / "0123.lock") == 0o600
        assert mode(folder / "0123") == 0o700


def test_lock_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "lock", lambda fd, path: lock(fd, path, seconds=0.3))
    holder = (
        "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX)\nprint(flush=True); sys.stdin.read()"
    )
    with EventWriter(tmp_path) as emit:
        emit(Notice(message="before"))
        file = tmp_path / "events.jsonl"
        command = [sys.executable, "-c", holder, str(file)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            begin = time.monotonic()
            with pytest.raises(StorageError, match=r"held the lock of events\.jsonl") as caught:
                emit(Notice(message="blocked"))
            assert 0.3 <= time.monotonic() - begin < 20
            assert caught.value.where == str(file)
            assert process.stdin is not None
            process.stdin.close()
        emit(Notice(message="after"))
    assert [event["message"] for event in raw_events(tmp_path)] == ["before", "after"]
    assert private.LOCK_SECONDS == 30


def test_lock_waits_for_release(tmp_path: Path) -> None:
    path = tmp_path / "f"
    first, second = (os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(2))
    try:
        fcntl.flock(first, fcntl.LOCK_EX)
        with pytest.raises(StorageError):
            lock(second, path, seconds=0.05)
        fcntl.flock(first, fcntl.LOCK_UN)
        lock(second, path, seconds=0.05)
    finally:
        os.close(first)
        os.close(second)


@pytest.mark.parametrize(
    "name", ["run.lock", "events.jsonl", "config.yaml", "worker.log", ".partial-x", "stop-requested"]
)
def test_planted_symlink_is_refused_and_target_unchanged(name: str, tmp_path: Path) -> None:
    victim, run = tmp_path / "victim", RunDir(tmp_path / "run")
    victim.write_text("years of work")
    run.mark()
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).symlink_to(victim)
    for resume in (True, False):
        with pytest.raises(RunDirectoryError, match="a symlink"), run.claim(resume=resume, overwrite=not resume):
            pytest.fail("claimed")
    assert victim.read_text() == "years of work"


@pytest.mark.parametrize("name", [name for name in CONTENTS if "." not in name and name != "stop-requested"])
def test_planted_folder_symlink_is_refused(name: str, tmp_path: Path) -> None:
    victim, run = tmp_path / "victim", RunDir(tmp_path / "run")
    victim.mkdir()
    (victim / "thesis").write_text("years of work")
    run.mark()
    (run.path / name).symlink_to(victim)
    with pytest.raises(RunDirectoryError, match="a symlink"), run.claim(resume=True, overwrite=False):
        pytest.fail("claimed")
    (run.path / name).unlink()
    if name in ("checkpoints", "adapter", "sinks"):
        (run.path / name).mkdir()
        (run.path / name / "step-00000001").symlink_to(victim)
        with pytest.raises(RunDirectoryError, match="a symlink"), run.claim(resume=True, overwrite=False):
            pytest.fail("claimed")
    assert (victim / "thesis").read_text() == "years of work"


def test_writers_do_not_follow_symlinks_and_use_random_names(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("years of work")
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("events.jsonl", ".partial-config.yaml", "config.yaml"):
        (folder / name).symlink_to(victim)
    with pytest.raises(StorageError, match="it is a symlink"):
        EventWriter(folder)
    write_text(folder / "config.yaml", "new")
    assert (folder / "config.yaml").read_text() == "new"
    assert not (folder / "config.yaml").is_symlink()
    (folder / ".partial-adapter").symlink_to(tmp_path)
    with pytest.raises(StorageError, match="Saving adapter failed"), committed_folder(folder / "adapter"):
        pytest.fail("entered")
    (folder / ".partial-adapter").unlink()
    names = set()
    for _ in range(2):
        with committed_folder(folder / "adapter") as scratch:
            names.add(scratch.name)
    assert len(names) == 2
    os.mkfifo(folder / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        open_private(folder / "pipe", os.O_RDWR)
    assert victim.read_text() == "years of work"


def test_scratch_of_another_name_is_kept(tmp_path: Path) -> None:
    with committed_folder(tmp_path / "model-2") as other:
        with committed_folder(tmp_path / "model"):
            pass
        with pytest.raises(KeyError), no_scratch_left(tmp_path / "model"):
            raise KeyError
        assert other.is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model-2"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner")
@pytest.mark.parametrize("link", [False, True])
def test_an_earlier_save_that_another_user_planted_is_not_restored(tmp_path: Path, link: bool) -> None:
    """In a folder that others can write to, they know the name under which a save keeps what it replaces."""
    planted = tmp_path / ".partial-old-model"
    (evil := tmp_path / "evil").mkdir()
    (evil / "model.safetensors").write_text("evil")
    os.chown(evil, OTHER_UID, OTHER_UID)
    if link:
        planted.symlink_to(evil)
    else:
        evil.rename(planted)
    with pytest.raises(StorageError, match="belongs to another user"), committed_folder(tmp_path / "model"):
        pytest.fail("saved")
    assert not (tmp_path / "model").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner")
def test_folders_of_other_users_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o777)
    os.chown(folder, OTHER_UID, OTHER_UID)
    with pytest.raises(RunDirectoryError, match=f"belongs to another user .uid {OTHER_UID}"):
        RunDir(folder).mark()
    claim = RunDir(folder).claim(resume=False, overwrite=False)
    with pytest.raises(RunDirectoryError, match="belongs to another user"), claim:
        pytest.fail("claimed")
    with pytest.raises(StorageError, match="belongs to another user"), fingerprint_lock(folder, "0123", silent):
        pytest.fail("locked")
    assert not any(folder.iterdir())
    RunDir(folder / "mine").mark()  # a folder inside another user's folder (a mounted host folder) is fine


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner")
def test_symlinks_of_other_users_are_not_followed(tmp_path: Path) -> None:
    """Such a symlink may point to a folder of this user that the other user chose."""
    private_folder(tmp_path / "own")
    for name, owner in (("mine", os.geteuid()), ("theirs", OTHER_UID)):
        (tmp_path / name).symlink_to("own")
        os.chown(tmp_path / name, owner, owner, follow_symlinks=False)
    private_folder(tmp_path / "mine")
    with pytest.raises(RunDirectoryError, match=f"a symlink of another user .uid {OTHER_UID}"):
        RunDir(tmp_path / "theirs").mark()
    assert not any((tmp_path / "own").iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can switch users")
def test_another_user_cannot_lock_run_files() -> None:
    """A user who cannot open a file cannot lock it."""
    with tempfile.TemporaryDirectory() as folder, umask(0o022):
        os.chmod(folder, 0o755)  # like a home folder that others can list
        run = RunDir(Path(folder) / "run")
        run.mark()
        with EventWriter(run.path):
            for name in ("events.jsonl", "run.lock"):
                command = ["/bin/sh", "-c", 'exec 3<"$1"', "sh", str(run.path / name)]
                done = subprocess.run(
                    command, user=OTHER_UID, group=OTHER_UID, extra_groups=[], capture_output=True, timeout=60,
                    check=False, cwd="/",
                )  # fmt: skip
                assert done.returncode != 0


def test_file_at_the_folder_path_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(RunDirectoryError, match="not a folder"):
        RunDir(tmp_path / "run").mark()
    with pytest.raises(OSError, match="No such file"):
        (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
        private_folder(tmp_path / "dangling")
