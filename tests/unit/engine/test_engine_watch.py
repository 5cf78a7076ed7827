"""A process that gets on says so; one that does not leaves its stacks."""

from __future__ import annotations

import time
from pathlib import Path

from pantheraml.engine.guard.watch import StepWatch


def wait_for_stacks(file: Path) -> str:
    deadline = time.monotonic() + 10
    while not (text := file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return text


def test_stacks_come_late_and_go_when_it_gets_on(tmp_path: Path) -> None:
    file = tmp_path / "rank-3.txt"
    with StepWatch(tmp_path, rank=3, timeout_seconds=0.2) as watch:
        watch.beat()
        assert file.read_text() == ""
        assert "wait_for_stacks" in wait_for_stacks(file)
        watch.beat()
        assert file.read_text() == ""
    assert not file.exists(), "nothing is left of a run that came to its end"


def test_a_pause_may_take_long(tmp_path: Path) -> None:
    with StepWatch(tmp_path, rank=0, timeout_seconds=0.1) as watch:
        watch.pause()
        time.sleep(0.3)
        assert (tmp_path / "rank-0.txt").read_text() == ""
        watch.beat()
        assert wait_for_stacks(tmp_path / "rank-0.txt")


def test_a_short_pause_ends_with_the_next_beat(tmp_path: Path) -> None:
    with StepWatch(tmp_path, rank=0, timeout_seconds=1.0) as watch:
        watch.pause()
        watch.beat()
        assert wait_for_stacks(tmp_path / "rank-0.txt")


def test_heartbeats_are_fewer_than_beats(tmp_path: Path) -> None:
    told: list[int] = []
    with StepWatch(tmp_path, rank=0, timeout_seconds=2.0, heartbeat=lambda: told.append(1)) as watch:
        begin = time.monotonic()
        while time.monotonic() - begin < 0.5:
            watch.beat()
    assert 2 <= len(told) <= 3, "one at the start, then every tenth of the timeout"
