"""A worker that is killed: the run goes on from its last checkpoint and ends as if nothing had happened."""

from __future__ import annotations

import hashlib
import json
import signal
import time

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


@pytest.mark.timeout(300)
@pytest.mark.parametrize("processes", [1, 2])
def test_the_result_is_that_of_an_undisturbed_run(playground: Playground, processes: int) -> None:
    calm, killed = f"runs/calm-{processes}", f"runs/killed-{processes}"
    nproc = ["--nproc", str(processes)]
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
