"""Watchdog: heartbeats while a process makes progress, stack and collective dumps when it is stuck."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pantheraml.base.events import EventBase, Heartbeat
from pantheraml.engine.guard import watchdog as guard_watch
from pantheraml.engine.guard.watchdog import LONG_WORK_SECONDS, StackDumpWatchdog, recorded_collectives
from pantheraml.launch.flight_record import Collective, RankRecord, read_records

RECORD = RankRecord((Collective("all_reduce", 3, "0", paired=False, done=False, begun_ns=1),))


PATIENCE = 100.0
"""Timeout in seconds for events that do happen."""


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_stacks(file: Path) -> None:
    wait_until(lambda: " in test_" in file.read_text())  # among the last lines written


def beat_here(watch: StackDumpWatchdog, file: Path) -> str:
    """Beat, then return the stacks dumped while waiting here."""
    watch.beat()
    wait_until(lambda: " in beat_here" in file.read_text())
    return file.read_text()


def beat_there(watch: StackDumpWatchdog, file: Path) -> str:
    watch.beat()
    wait_until(lambda: " in beat_there" in file.read_text())
    return file.read_text()


def wait_for_record(folder: Path) -> RankRecord:
    wait_until(lambda: bool(read_records(folder)))
    return read_records(folder)[0]


def test_stacks_are_dumped_late_and_removed_on_progress(tmp_path: Path) -> None:
    file = tmp_path / "rank-3.txt"
    with StackDumpWatchdog(tmp_path, rank=3, timeout_seconds=0.2) as watch:
        assert "beat_there" not in beat_here(watch, file)
        assert "beat_here" not in beat_there(watch, file), "the previous dump is gone"
    assert not list(tmp_path.iterdir()), "a finished run leaves no files"


def test_stack_file_exists_from_the_start(tmp_path: Path) -> None:
    """It is all there is of a suspended rank."""
    with StackDumpWatchdog(tmp_path, rank=1, timeout_seconds=PATIENCE) as watch:
        assert (tmp_path / "rank-1.txt").read_text() == ""
        watch.beat()
        assert (tmp_path / "rank-1.txt").read_text() == ""


def test_long_work_gets_the_longer_timeout(tmp_path: Path) -> None:
    file = tmp_path / "rank-0.txt"
    with StackDumpWatchdog(tmp_path, rank=0, timeout_seconds=0.1, long_work_seconds=PATIENCE) as watch:
        time.sleep(0.3)
        assert file.read_text() == "", "loading the model counts as long work, until the first beat"
        watch.beat()
        wait_for_stacks(file)
        watch.expect_long_work()
        time.sleep(0.3)
        assert file.read_text() == ""
        watch.beat()
        wait_for_stacks(file)


def test_long_work_times_out_too(tmp_path: Path) -> None:
    with StackDumpWatchdog(tmp_path, rank=0, timeout_seconds=0.1, long_work_seconds=0.5):
        wait_for_stacks(tmp_path / "rank-0.txt")


def test_long_work_timeout_is_at_least_the_step_timeout(tmp_path: Path) -> None:
    with StackDumpWatchdog(tmp_path, rank=0, timeout_seconds=100 * LONG_WORK_SECONDS, long_work_seconds=0.1):
        time.sleep(0.3)
        assert (tmp_path / "rank-0.txt").read_text() == ""


def test_heartbeats_are_rate_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emitted: list[Any] = []
    now = [1000.0]
    monkeypatch.setattr(guard_watch, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def record(event: EventBase, /) -> None:
        assert isinstance(event, Heartbeat)
        emitted.append((now[0], event.step))

    with StackDumpWatchdog(tmp_path, rank=0, timeout_seconds=200.0, heartbeat=record) as watch:
        watch.beat()
        assert not emitted, "the step is not known yet"
        watch.beat(7)
        for _ in range(50):
            now[0] += 1
            watch.beat()
    # one at the start, then one per tenth of the timeout
    assert emitted == [(moment, 7) for moment in (1000.0, 1021.0, 1042.0)]


def test_collectives_are_dumped_late_and_removed_on_progress(tmp_path: Path) -> None:
    may_answer = threading.Event()

    def collectives() -> RankRecord:
        assert may_answer.wait(PATIENCE)
        return RECORD

    with StackDumpWatchdog(tmp_path, rank=0, timeout_seconds=0.2, collectives=collectives) as watch:
        for _ in range(2):
            may_answer.clear()
            watch.beat()
            assert not read_records(tmp_path)
            may_answer.set()
            assert wait_for_record(tmp_path) == RECORD
        watch.expect_long_work()
        assert not read_records(tmp_path)
        watch.beat()
        assert wait_for_record(tmp_path) == RECORD, "a shorter alarm replaces a longer one"
    assert not list(tmp_path.iterdir())
    wait_until(lambda: "alarm" not in {thread.name for thread in threading.enumerate()})


def test_training_does_not_wait_for_a_hanging_flight_recorder(tmp_path: Path) -> None:
    asked, answer = threading.Event(), threading.Event()

    def collectives() -> RankRecord:
        asked.set()
        assert answer.wait(PATIENCE)
        return RECORD

    with StackDumpWatchdog(tmp_path, rank=0, timeout_seconds=0.2, collectives=collectives) as watch:
        watch.beat()
        assert asked.wait(PATIENCE)
        begin = time.monotonic()
        watch.beat()
        assert time.monotonic() - begin < 50
        answer.set()
    assert not read_records(tmp_path), "a late result is not written"


@contextmanager
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_flight_recorder_format_is_parsed(tmp_path: Path) -> None:
    with group_of_one():
        for _ in range(3):
            dist.all_reduce(torch.ones(2))
        wait_until(lambda: recorded_collectives("gloo").current is None)  # recorded shortly after completion
        found = recorded_collectives("gloo")
    newest = found.collectives[-1]
    assert (newest.name, newest.paired, newest.done) == ("all_reduce", False, True)
    assert newest.group.endswith("(default_pg)")
    assert found.begun(newest.group) == newest.number >= 3
    assert found.current is None
