"""How a failed attempt is reported. Real processes, which run a few lines instead of a training."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from pantheraml.base.env import child_environment
from pantheraml.base.errors import HangError, PantheraError, WorkerError, WorkerKilledError
from pantheraml.base.event_stream import EventWriter
from pantheraml.base.events import ErrorRaised
from pantheraml.launch import local
from pantheraml.launch.local import StopRequests
from pantheraml.readers.follow import Follower
from pantheraml.runs.attempt import Attempt, WorkerCommand
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import TrainConfig

STACKS = """
import os, pathlib, signal, sys, time
run = pathlib.Path(sys.argv[1])
def leave(rank, function, file):
    frames = f'File "{file}", line 1 in {function}\\n  File "/x/pantheraml/engine/loop.py", line 2 in _step'
    (run / "aside").mkdir(exist_ok=True)
    (run / f"aside/rank-{rank}.txt").write_text(f"Thread 0x1 (most recent call first):\\n  {frames}\\n")
"""
STUCK = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
leave(0, "all_gather", "/x/torch/distributed/distributed_c10d.py")
leave(1, "read", "/x/pantheraml/data/dataset.py")
os.rename(run / "aside", run / "stacks")  # both at once: who is watched has little time for the second
time.sleep(200)
"""
ABORTS = "os.abort()"


def end_of(folder: Path, code: str) -> PantheraError:
    """The error of an attempt whose worker runs `code`, with a hang timeout of one second."""
    values = {"model": {"path": "m"}, "data": {"path": "d"}, "parallel": {"timeout_seconds": 1}}
    with pytest.raises(PantheraError) as found:
        workers = WorkerCommand(
            [sys.executable, "-c", STACKS + code, str(folder)], child_environment(), ask_to_stop=None
        )
        config = TrainConfig.model_validate(values)
        Attempt(Follower(folder, [])).supervise(RunDir(folder), config, workers, StopRequests())
    return found.value


def test_a_hang_ends_at_once_and_names_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "KILL_AFTER_SECONDS", 150.0)
    begin = time.monotonic()
    err = end_of(tmp_path, STUCK)
    assert time.monotonic() - begin < 100, "nobody waits for processes that do not hear"
    assert isinstance(err, HangError)
    assert "rank 1 is stuck in read (dataset.py, line 1), and rank 0 waits for it." in err.what
    assert err.fix is not None
    assert "There is no checkpoint yet" in err.fix
    assert "pantheraml resume" not in err.fix


def test_a_hang_after_a_checkpoint_says_where_the_run_goes_on(tmp_path: Path) -> None:
    for step in (5, 10):
        (tmp_path / f"checkpoints/step-{step}").mkdir(parents=True)
        (tmp_path / f"checkpoints/step-{step}/manifest.json").touch()
    err = end_of(tmp_path, STUCK)
    assert err.fix is not None
    assert f"`pantheraml resume {tmp_path}` continues from step 10" in err.fix


def test_a_crash_in_native_code_is_no_hang(tmp_path: Path) -> None:
    err = end_of(tmp_path, ABORTS)
    assert isinstance(err, WorkerKilledError)
    assert err.what == "A worker process was killed by SIGABRT."


def test_ranks_that_wait_for_one_that_failed_are_not_what_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "KILL_AFTER_SECONDS", 0.5)
    with EventWriter(tmp_path, rank=1) as emit:
        emit(ErrorRaised.of(WorkerError("Rank 1 is unwell.")))
    err = end_of(tmp_path, STUCK)
    assert err.what == "Rank 1 is unwell."
