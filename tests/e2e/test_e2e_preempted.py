"""Being asked to stop, kindly and less so: what is saved stays whole, and the exit code says who asked."""

from __future__ import annotations

import json
import signal
import time

import psutil
import pytest

from pantheraml.base.errors import InterruptedRunError, PreemptedError
from pantheraml.checkpoint.store import CheckpointStore
from pantheraml.specs.run_dir import RunDir
from tests.e2e.conftest import Playground, workers_of

ENDLESS = ("--set", "train.max_steps=100000", "--set", "train.schedule=constant")


@pytest.mark.timeout(200)
def test_sigterm_saves_within_the_grace_period_and_has_a_code_of_its_own(playground: Playground) -> None:
    settings = [*ENDLESS, "--nproc", "2", "--set", "parallel.grace_seconds=60"]
    process = playground.start_training("runs/preempted", *settings)
    playground.wait_for_steps("runs/preempted")
    everyone = psutil.Process(process.pid)
    begin = time.monotonic()
    for one in [everyone, *everyone.children(recursive=True), everyone]:  # and some twice, as schedulers do
        one.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=90)
    assert time.monotonic() - begin < 60
    assert process.returncode == PreemptedError.exit_code == 143, err
    assert "Stopped by SIGTERM" in err
    assert "pantheraml resume runs/preempted" in err
    assert "Traceback" not in err
    run = playground.root / "runs/preempted"
    assert json.loads((run / "run.json").read_text())["status"] == "preempted"
    assert RunDir(run).last_checkpoint() == json.loads((run / "run.json").read_text())["steps"]


@pytest.mark.timeout(200)
def test_a_second_ctrl_c_ends_it_at_once_and_breaks_no_checkpoint(playground: Playground) -> None:
    run = playground.root / "runs/hurry"
    process = playground.start_training("runs/hurry", *ENDLESS, "--set", "checkpoint.every_steps=1")
    playground.wait_for_steps("runs/hurry")
    while not list((run / "checkpoints").glob("step-*/manifest.json")):
        time.sleep(0.01)
    (worker,) = workers_of(process.pid)
    worker.suspend()  # it will not have saved and left before the second one comes
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - begin < 8, "and not the grace period of 120 s"
    assert process.returncode == InterruptedRunError.exit_code, err
    assert not worker.is_running()
    store = CheckpointStore(run / "checkpoints")
    for step in store.steps():
        store.load(step)
    last = store.steps()[-1]
    resumed = playground("resume", "runs/hurry", "--set", f"train.max_steps={last + 1}")
    assert resumed.code == 0, resumed
