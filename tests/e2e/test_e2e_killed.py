"""A killed worker: the run resumes from its last checkpoint, with the same result."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import replace

import psutil
import pytest

from pantheraml.base.errors import WorkerKilledError
from pantheraml.specs.faults import fail_at
from tests.e2e.conftest import Playground, result_of, wait_until, workers_of
from tests.event_log import raw_events
from tests.harness import values

pytestmark = pytest.mark.extended

AGENT = "pantheraml.worker.entry"
SETTINGS = [
    *("--set", "train.max_steps=40"),
    *("--set", "checkpoint.every_steps=5"),
    *("--set", "method.dropout=0.1"),
]


def adapter_hash(playground: Playground, run: str) -> str:
    return hashlib.sha256((playground.root / run / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()


def hold(playground: Playground, rank: int, step: int) -> Playground:
    """Command line whose run hangs at this step, once, to be killed there: otherwise it might finish first on a busy
    machine."""
    return replace(playground, environment={**playground.environment, "PANTHERAML_FAULTS": fail_at(rank, step, "hang")})


def wait_until_held(playground: Playground, run: str) -> None:
    """And until there is a checkpoint to resume from."""
    wait_until(lambda: list((playground.root / run / "faults").glob("*-hang")))
    playground.wait_for_checkpoint(run)


def rank_of(pid: int, rank: int) -> list[psutil.Process]:
    return [worker for worker in workers_of(pid) if worker.environ().get("RANK", "0") == str(rank)]


def kill(pid: int, rank: int = 0) -> None:
    """Kill a rank once it has started."""
    wait_until(lambda: rank_of(pid, rank))
    rank_of(pid, rank)[0].kill()


@pytest.mark.seed("S1-012", "S1-031", "S3-072", "S4-118")
def test_a_run_survives_kills_at_any_time(playground: Playground) -> None:
    """While the model is loaded, amid the steps, and when the result is about to be saved."""
    run = "runs/killed-1"
    assert playground.train("runs/calm-1", *SETTINGS).code == 0
    held = hold(playground, rank=0, step=7)
    process = held.start_training(run, *SETTINGS)
    playground.wait_for_event(run, "data.ready")
    kill(process.pid)
    playground.wait_for_event(run, "run.restarted")
    wait_until_held(playground, run)
    kill(process.pid)
    playground.wait_for_event(run, "train.finished")
    with contextlib.suppress(psutil.NoSuchProcess):  # it may be over by now
        for worker in rank_of(process.pid, 0):
            worker.kill()
    done = result_of(process)
    assert done.code == 0, done
    assert len(values(raw_events(playground.root / run), "run.restarted", "step")) >= 2
    assert adapter_hash(playground, run) == adapter_hash(playground, "runs/calm-1")


def test_a_killed_run_matches_an_undisturbed_one(playground: Playground) -> None:
    calm, killed = "runs/calm-2", "runs/killed-2"
    nproc = ["--nproc", "2"]
    assert playground.train(calm, *SETTINGS, *nproc).code == 0
    held = hold(playground, rank=1, step=7)
    process = held.start_training(killed, *SETTINGS, *nproc)
    wait_until_held(playground, killed)
    kill(process.pid, rank=1)
    done = result_of(process)
    assert done.code == 0, done
    assert "SIGKILL" in done.err
    assert "Resuming from step" in done.err
    events = raw_events(playground.root / killed)
    assert len(values(events, "train.started", "first_step")) == 2
    assert values(events, "train.started", "first_step")[1] > 1
    assert json.loads((playground.root / killed / "run.json").read_text())["status"] == "succeeded"
    assert adapter_hash(playground, killed) == adapter_hash(playground, calm)


def test_a_killed_agent_is_not_a_stop_request(playground: Playground) -> None:
    """Its ranks get SIGTERM from the kernel and save; the run resumes from there."""
    run = "runs/killed-agent"
    process = playground.start_training(run, "--set", "train.max_steps=100000", "--nproc", "2")
    playground.wait_for_steps(run)
    (agent,) = [child for child in psutil.Process(process.pid).children() if AGENT in child.cmdline()]
    agent.kill()
    playground.wait_for_event(run, "train.started", 2)
    (restart,) = [event for event in raw_events(playground.root / run) if event["kind"] == "run.restarted"]
    assert "was killed by SIGKILL" in restart["message"]
    assert restart["step"] > 0, "the checkpoint the ranks saved is used"
    process.terminate()
    done = result_of(process)
    assert done.code == 143, done
    assert "Stopped by SIGTERM" in done.err


def test_a_run_continues_with_fewer_ranks(playground: Playground) -> None:
    """No retries are left for rank 1: one process takes over the whole batch."""
    tested = replace(playground, environment={**playground.environment, "PANTHERAML_FAULTS": "1:4:kill"})
    settings = ["train.max_steps=6", "checkpoint.every_steps=2", "checkpoint.background=false", "method.rank=4"]
    given = [part for setting in settings for part in ("--set", setting)]
    assert playground.train("runs/one-process", *given).code == 0
    lost = ["parallel.max_retries=0", "parallel.min_world_size=1"]
    done = tested.train("runs/left", *given, "--nproc", "2", *(part for setting in lost for part in ("--set", setting)))
    assert done.code == 0, done
    assert "with 1 of 2 ranks; the global batch, and so the result, stays" in done.err
    alone, left = (raw_events(playground.root / "runs" / name) for name in ("one-process", "left"))
    assert values(left, "train.started", "world_size") == [2, 1]
    assert values(left, "train.started", "first_step") == [1, 3]
    losses = [
        dict(zip(values(of, "train.step", "step"), values(of, "train.step", "loss"), strict=True))
        for of in (left, alone)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.seed("S1-032")
def test_a_run_without_retries_reports_the_kill(playground: Playground) -> None:
    never = ["--set", "parallel.max_retries=0"]
    process = playground.start_training("runs/never", "--set", "train.max_steps=100000", *never)
    playground.wait_for_steps("runs/never")
    kill(process.pid)
    done = result_of(process)
    assert done.code == WorkerKilledError.exit_code, done
    assert "A worker process was killed by SIGKILL" in done.err
    assert "Traceback" not in done.err
    assert json.loads((playground.root / "runs/never/run.json").read_text())["status"] == "crashed"
