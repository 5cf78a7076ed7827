"""A hung rank: the run ends within the timeout, and the error names the rank and the function."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pantheraml.base.errors import HangError
from tests.e2e.conftest import Playground, result_of
from tests.event_log import raw_events

pytestmark = pytest.mark.extended

LATE_SECONDS = 60.0
"""Slack for the error: one second between checks of the parent, one between the heartbeats that time is counted from,
and the rest for a busy machine. A run that is not ended would hang forever."""


def hang(playground: Playground, run: str, *, rank: int, nproc: int, timeout: int) -> tuple[int, str, Any]:
    """Run with a rank that hangs at step 3; return exit code, stderr and events."""
    tested = replace(playground, environment={**playground.environment, "PANTHERAML_FAULTS": "1"})
    settings = [f'faults=["{rank}:3:hang"]', f"parallel.timeout_seconds={timeout}", "parallel.grace_seconds=2"]
    given = [part for setting in (*settings, "train.max_steps=1000") for part in ("--set", setting)]
    ended = result_of(tested.start_training(run, "--nproc", str(nproc), *given))
    return ended.code, ended.err, raw_events(playground.root / run)


def seconds_stuck(events: Any, rank: int) -> float:
    """From the last sign of life of a rank to the error."""
    beats = [event for event in events if event["kind"] == "heartbeat" and event["rank"] == rank]
    [error] = [event for event in events if event["kind"] == "error"]
    return float(error["clock"] - beats[-1]["clock"])


@pytest.mark.seed("S0-107", "S2-056", "S4-140")
def test_the_stuck_rank_is_named(playground: Playground) -> None:
    code, err, events = hang(playground, "runs/hang", rank=1, nproc=2, timeout=10)
    assert code == HangError.exit_code, err
    assert "rank 1 is stuck in hang (fault_injection.py" in err
    assert "rank 0 waits for it" in err
    assert "According to torch's flight recorder, rank 0 is in all" in err
    assert "There is no checkpoint yet" in err
    assert "Traceback" not in err
    assert "in hang" in (playground.root / "runs/hang/stacks/rank-1.txt").read_text()
    beats = [event for event in events if event["kind"] == "heartbeat"]
    assert {event["rank"] for event in beats} == {0, 1}
    assert {event["step"] for event in beats} <= {0, 1, 2}
    # the only error is the parent's: no rank has given up by itself, as it would if its collective had timed out
    assert seconds_stuck(events, rank=1) < 1.2 * 10 + LATE_SECONDS


def test_a_hung_single_process_is_ended(playground: Playground) -> None:
    code, err, events = hang(playground, "runs/hang-alone", rank=0, nproc=1, timeout=5)
    assert code == HangError.exit_code, err
    assert "rank 0 is stuck in hang (fault_injection.py" in err
    assert seconds_stuck(events, rank=0) < 1.2 * 5 + LATE_SECONDS
