"""A rank that hangs: the run ends within the timeout, and the error names the rank and the place."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from pantheraml.base.errors import HangError
from pantheraml.base.events import read_events
from tests.e2e.conftest import Playground


def hang(playground: Playground, run: str, *, rank: int, nproc: int, timeout: int) -> tuple[int, str, float]:
    """The exit code of a run one of whose ranks hangs at the third step, what it said, and how long it took to end."""
    tested = replace(playground, environment={**playground.environment, "PANTHERAML_FAULTS": "1"})
    settings = [f'faults=["{rank}:3:hang"]', f"parallel.timeout_seconds={timeout}", "parallel.grace_seconds=2"]
    given = [part for setting in (*settings, "train.max_steps=1000") for part in ("--set", setting)]
    process = tested.start_training(run, "--nproc", str(nproc), *given)
    playground.wait_for_steps(run)
    begin = time.monotonic()
    _, err = process.communicate(timeout=120)
    return process.returncode, err, time.monotonic() - begin


@pytest.mark.timeout(200)
def test_the_stuck_rank_is_named(playground: Playground) -> None:
    code, err, seconds = hang(playground, "runs/hang", rank=1, nproc=2, timeout=10)
    assert code == HangError.exit_code, err
    assert "rank 1 is stuck in hang (faults.py" in err
    assert "rank 0 waits for it" in err
    assert "Traceback" not in err
    assert seconds < 60
    assert "in hang" in (playground.root / "runs/hang/stacks/rank-1.txt").read_text()
    beats = [event for event in read_events(playground.root / "runs/hang") if event["kind"] == "heartbeat"]
    assert {event["rank"] for event in beats} == {0, 1}
    assert {event["step"] for event in beats} <= {0, 1, 2}


@pytest.mark.timeout(200)
def test_a_process_that_nobody_waits_for_is_ended_too(playground: Playground) -> None:
    code, err, seconds = hang(playground, "runs/hang-alone", rank=0, nproc=1, timeout=5)
    assert code == HangError.exit_code, err
    assert "rank 0 is stuck in hang (faults.py" in err
    assert seconds < 40
