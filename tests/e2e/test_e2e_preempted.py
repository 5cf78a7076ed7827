"""Preemption and Ctrl-C: checkpoints stay intact, and the exit code tells them apart."""

from __future__ import annotations

import contextlib
import json
import signal

import psutil
import pytest

from pantheraml.base.errors import InterruptedRunError, PreemptedError
from pantheraml.checkpoint.store import CheckpointStore
from pantheraml.specs.run_dir import RunDir
from tests.e2e.conftest import Playground, result_of, wait_until, workers_of

pytestmark = pytest.mark.extended

GRACE_SECONDS = 200
ENDLESS = ("--set", "train.max_steps=100000", "--set", "train.schedule=constant")


@pytest.mark.seed("S0-113")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=["SIGTERM", "SIGUSR1"])
def test_preemption_saves_within_the_grace_period(playground: Playground, number: signal.Signals) -> None:
    run = playground.root / "runs" / number.name
    settings = [*ENDLESS, "--nproc", "2", "--set", f"parallel.grace_seconds={GRACE_SECONDS}"]
    process = playground.start_training(f"runs/{number.name}", *settings)
    playground.wait_for_steps(f"runs/{number.name}")
    parent = psutil.Process(process.pid)
    agent, *ranks = parent.children(recursive=True)
    for one in [parent, agent, parent, *ranks]:  # and some twice, as schedulers do
        with contextlib.suppress(psutil.NoSuchProcess):  # as quick as that
            one.send_signal(number)
    ended = result_of(process, timeout=GRACE_SECONDS)
    assert ended.code == PreemptedError.exit_code == 143, ended
    assert f"Stopped by {number.name}, as schedulers send it" in ended.err
    assert f"pantheraml resume runs/{number.name}" in ended.err
    assert "Traceback" not in ended.err
    assert json.loads((run / "run.json").read_text())["status"] == "preempted"
    assert RunDir(run).last_checkpoint() == json.loads((run / "run.json").read_text())["steps"]


def test_a_second_ctrl_c_ends_at_once_and_keeps_checkpoints_intact(playground: Playground) -> None:
    run = playground.root / "runs/hurry"
    settings = [*ENDLESS, "--set", "checkpoint.every_steps=1", "--set", "parallel.grace_seconds=10000"]
    process = playground.start_training("runs/hurry", *settings)
    playground.wait_for_checkpoint("runs/hurry")
    (worker,) = workers_of(process.pid)
    worker.suspend()  # it will not have saved and left before the second one comes
    process.send_signal(signal.SIGINT)
    wait_until(RunDir(run).stop_file.exists)  # two at once would count as one
    process.send_signal(signal.SIGINT)
    ended = result_of(process)  # and not after the grace period, for which the test would not wait
    assert ended.code == InterruptedRunError.exit_code, ended
    assert not worker.is_running()
    store = CheckpointStore(run / "checkpoints")
    for step in store.steps():
        store.load(step)
    last = store.steps()[-1]
    resumed = playground("resume", "runs/hurry", "--set", f"train.max_steps={last + 1}")
    assert resumed.code == 0, resumed
