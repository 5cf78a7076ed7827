"""Supervisors seen from outside: liveness, and outdated starts. No training is run."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pantheraml.base.env import child_environment
from pantheraml.runs import supervisor
from pantheraml.runs.process_identity import ProcessIdentity
from pantheraml.runs.supervised import JOB, Limits, RunExit, RunRequest, SupervisedRun, SupervisorRecord


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the job `ftjob-1`, in its third start."""
    process = subprocess.Popen(["sleep", "60"], env=child_environment(**{JOB: "ftjob-1:3"}))
    yield process
    process.kill()
    process.wait()


def test_a_process_is_known_by_boot_pid_and_start_time(sleeper: subprocess.Popen[bytes]) -> None:
    identity = ProcessIdentity.of(sleeper.pid)
    assert identity is not None
    assert identity.is_running()
    assert not identity.model_copy(update={"start_time": "1"}).is_running(), "a later process with this pid"
    assert not identity.model_copy(update={"boot_id": "another"}).is_running()
    os.kill(sleeper.pid, 9)
    deadline = time.monotonic() + 10
    while identity.is_running() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not identity.is_running(), "a zombie does not run"


def test_a_supervisor_is_found_by_its_record_or_its_mark(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    run = SupervisedRun(tmp_path, "ftjob-1")
    assert run.is_running(3), "it has not written its record yet"
    assert not run.is_running(2)
    assert not SupervisedRun(tmp_path, "ftjob-2").is_anyone_left()
    me = ProcessIdentity.of(os.getpid())
    assert me is not None
    gone = me.model_copy(update={"start_time": "1"})
    (tmp_path / "supervisor.json").write_text(SupervisorRecord(token=3, identity=gone).model_dump_json())
    assert not run.is_running(3), "its record says that it is gone; what is left are its workers"
    assert run.is_anyone_left()
    assert run.kill() == 1
    assert not run.is_anyone_left()


def test_only_the_end_of_this_start_counts(tmp_path: Path) -> None:
    run = SupervisedRun(tmp_path, "ftjob-1")
    assert run.ending(1) is None
    (tmp_path / "exit.json").write_text(RunExit(token=1, status="failed", time=0.0).model_dump_json())
    assert run.ending(2) is None
    found = run.ending(1)
    assert found is not None
    assert found.status == "failed"
    (tmp_path / "exit.json").write_text('{"token": 1, "sta')
    assert run.ending(1) is None


def test_a_supervisor_that_comes_too_late_does_nothing(tmp_path: Path) -> None:
    run = SupervisedRun(tmp_path, "ftjob-1")
    run.request_file.write_text(RunRequest(name="ftjob-1", token=2, config={}).model_dump_json())
    assert supervisor.main(tmp_path, 1) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["request.json"]


def test_a_start_that_cannot_run_says_why(tmp_path: Path) -> None:
    """The supervisor, for real, with a configuration that is none."""
    run = SupervisedRun(tmp_path / "job", "ftjob-1")
    process = run.start({"model": {}}, 1, Limits([tmp_path], tmp_path / "cache"))
    assert process.wait(120) == 0
    ended = run.ending(1)
    assert ended is not None
    assert (ended.status, ended.error) == ("failed", "ConfigError")
    assert "model.path" in (ended.what or "")
    assert not run.is_running(1)
    assert (tmp_path / "job").stat().st_mode & 0o077 == 0


def test_limits_hold_wherever_the_process_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run works in its own folder; paths that were relative to that of the service would not be found."""
    monkeypatch.chdir(tmp_path)
    environment = Limits([Path("models")], Path("cache")).environment(Path("jobs/one"))
    roots = [str(tmp_path / name) for name in ("models", "jobs/one", "cache")]
    assert environment["PANTHERAML_ALLOWED_ROOTS"].split(os.pathsep) == roots
    assert environment["PANTHERAML_CACHE"] == str(tmp_path / "cache")
