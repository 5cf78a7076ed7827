"""A worker that is killed: the run goes on from its last checkpoint and ends as if nothing had happened."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import time
from dataclasses import replace

import psutil
import pytest

from pantheraml.base.errors import WorkerKilledError
from pantheraml.base.events import read_events
from tests.e2e.conftest import Playground, workers_of
from tests.harness import values

SETTINGS = [
    *("--set", "train.max_steps=40"),
    *("--set", "checkpoint.every_steps=5"),
    *("--set", "method.dropout=0.1"),
]


def adapter_hash(playground: Playground, run: str) -> str:
    return hashlib.sha256((playground.root / run / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()


def wait_for_checkpoints(playground: Playground, run: str, count: int) -> None:
    deadline = time.monotonic() + 120
    while len(list((playground.root / run / "checkpoints").glob("step-*/manifest.json"))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def kill_after(moment: str, playground: Playground, run: str, pid: int) -> None:
    """Kill the worker once an event of that kind is written; it may be over by then."""
    events, deadline = playground.root / run / "events.jsonl", time.monotonic() + 120
    while not (events.exists() and f'"{moment}"' in events.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with contextlib.suppress(psutil.NoSuchProcess, IndexError):
        workers_of(pid)[-1].send_signal(signal.SIGKILL)


@pytest.mark.timeout(300)
def test_a_kill_is_survived_at_any_moment(playground: Playground) -> None:
    """While the model is loaded, amid the steps, and when the result is about to be saved."""
    assert playground.train("runs/calm-1", *SETTINGS).code == 0
    process = playground.start_training("runs/killed-1", *SETTINGS)
    for moment in ("data.ready", "checkpoint.saved", "train.finished"):
        kill_after(moment, playground, "runs/killed-1", process.pid)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert len(values(read_events(playground.root / "runs/killed-1"), "run.restarted", "step")) >= 2
    assert adapter_hash(playground, "runs/killed-1") == adapter_hash(playground, "runs/calm-1")


@pytest.mark.timeout(300)
def test_the_result_is_that_of_an_undisturbed_run(playground: Playground) -> None:
    calm, killed = "runs/calm-2", "runs/killed-2"
    nproc = ["--nproc", "2"]
    assert playground.train(calm, *SETTINGS, *nproc).code == 0
    process = playground.start_training(killed, *SETTINGS, *nproc)
    wait_for_checkpoints(playground, killed, 1)
    workers_of(process.pid)[-1].send_signal(signal.SIGKILL)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert "SIGKILL" in err
    assert "The run goes on from step" in err
    events = read_events(playground.root / killed)
    assert len(values(events, "train.started", "first_step")) == 2
    assert values(events, "train.started", "first_step")[1] > 1
    assert json.loads((playground.root / killed / "run.json").read_text())["status"] == "succeeded"
    assert adapter_hash(playground, killed) == adapter_hash(playground, calm)


@pytest.mark.timeout(300)
def test_a_run_goes_on_with_those_who_are_left(playground: Playground) -> None:
    """Rank 1 is gone for good, as far as the run may try: one process takes over the whole batch."""
    tested = replace(playground, environment={**playground.environment, "PANTHERAML_FAULTS": "1"})
    settings = ["train.max_steps=6", "checkpoint.every_steps=2", "checkpoint.background=false", "method.rank=4"]
    given = [part for setting in settings for part in ("--set", setting)]
    assert playground.train("runs/one-process", *given).code == 0
    lost = ["parallel.max_retries=0", "parallel.min_world_size=1", 'faults=["1:4:kill"]']
    ended = tested.train(
        "runs/left", *given, "--nproc", "2", *(part for setting in lost for part in ("--set", setting))
    )
    assert ended.code == 0, ended
    assert "with 1 of 2 processes; the global batch, and so the result, stays" in ended.err
    alone, left = (read_events(playground.root / "runs" / name) for name in ("one-process", "left"))
    assert values(left, "train.started", "world_size") == [2, 1]
    assert values(left, "train.started", "first_step") == [1, 3]
    losses = [
        dict(zip(values(of, "train.step", "step"), values(of, "train.step", "loss"), strict=True))
        for of in (left, alone)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.timeout(200)
def test_a_run_that_may_not_start_again_says_what_happened(playground: Playground) -> None:
    never = ["--set", "parallel.max_retries=0"]
    process = playground.start_training("runs/never", "--set", "train.max_steps=100000", *never)
    playground.wait_for_steps("runs/never")
    workers_of(process.pid)[-1].send_signal(signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == WorkerKilledError.exit_code, err
    assert "A worker process was killed by SIGKILL" in err
    assert "Traceback" not in err
    assert json.loads((playground.root / "runs/never/run.json").read_text())["status"] == "crashed"
