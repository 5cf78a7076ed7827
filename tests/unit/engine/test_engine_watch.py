"""A process that gets on says so; one that does not leaves its stacks, and the collectives that it is in."""

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

from pantheraml.engine.guard import watch as guard_watch
from pantheraml.engine.guard.collectives import recorded_collectives
from pantheraml.engine.guard.watch import LONG_WORK_SECONDS, StepWatch
from pantheraml.launch.flight_record import Collective, RankRecord, read_records

RECORD = RankRecord((Collective("all_reduce", 3, "0", paired=False, done=False, begun_ns=1),))


PATIENCE = 100.0
"""Seconds for what does happen."""


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_stacks(file: Path) -> None:
    wait_until(lambda: " in test_" in file.read_text())  # which is among the last that is written


def beat_here(watch: StepWatch, file: Path) -> str:
    """The stacks of a process that got no further than this, whenever they come."""
    watch.beat()
    wait_until(lambda: " in beat_here" in file.read_text())
    return file.read_text()


def beat_there(watch: StepWatch, file: Path) -> str:
    watch.beat()
    wait_until(lambda: " in beat_there" in file.read_text())
    return file.read_text()


def wait_for_record(folder: Path) -> RankRecord:
    wait_until(lambda: bool(read_records(folder)))
    return read_records(folder)[0]


def test_stacks_come_late_and_go_when_it_gets_on(tmp_path: Path) -> None:
    file = tmp_path / "rank-3.txt"
    with StepWatch(tmp_path, rank=3, timeout_seconds=0.2) as watch:
        assert "beat_there" not in beat_here(watch, file)
        assert "beat_here" not in beat_there(watch, file), "those of the last time are gone"
    assert not list(tmp_path.iterdir()), "nothing is left of a run that came to its end"


def test_the_file_is_there_from_the_beginning(tmp_path: Path) -> None:
    """Of a rank that is suspended there is nothing else."""
    with StepWatch(tmp_path, rank=1, timeout_seconds=PATIENCE) as watch:
        assert (tmp_path / "rank-1.txt").read_text() == ""
        watch.beat()
        assert (tmp_path / "rank-1.txt").read_text() == ""


def test_long_work_may_take_long(tmp_path: Path) -> None:
    file = tmp_path / "rank-0.txt"
    with StepWatch(tmp_path, rank=0, timeout_seconds=0.1, long_work_seconds=PATIENCE) as watch:
        time.sleep(0.3)
        assert file.read_text() == "", "until the first beat the model is loaded"
        watch.beat()
        wait_for_stacks(file)
        watch.expect_long_work()
        time.sleep(0.3)
        assert file.read_text() == ""
        watch.beat()
        wait_for_stacks(file)


def test_long_work_may_not_take_for_ever(tmp_path: Path) -> None:
    with StepWatch(tmp_path, rank=0, timeout_seconds=0.1, long_work_seconds=0.5):
        wait_for_stacks(tmp_path / "rank-0.txt")


def test_long_work_is_never_given_less_than_a_step(tmp_path: Path) -> None:
    with StepWatch(tmp_path, rank=0, timeout_seconds=100 * LONG_WORK_SECONDS, long_work_seconds=0.1):
        time.sleep(0.3)
        assert (tmp_path / "rank-0.txt").read_text() == ""


def test_heartbeats_are_fewer_than_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    now = [1000.0]
    monkeypatch.setattr(guard_watch, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def hear(kind: str, /, **fields: Any) -> None:
        told.append((now[0], kind, fields))

    with StepWatch(tmp_path, rank=0, timeout_seconds=200.0, heartbeat=hear) as watch:
        watch.beat()
        assert not told, "nobody knows yet how far the run had come"
        watch.beat(7)
        for _ in range(50):
            now[0] += 1
            watch.beat()
    # one at the start, then each time that more than a tenth of the timeout has passed
    assert told == [(moment, "heartbeat", {"step": 7}) for moment in (1000.0, 1021.0, 1042.0)]


def test_collectives_come_late_and_go_when_it_gets_on(tmp_path: Path) -> None:
    may_answer = threading.Event()

    def collectives() -> RankRecord:
        assert may_answer.wait(PATIENCE)
        return RECORD

    with StepWatch(tmp_path, rank=0, timeout_seconds=0.2, collectives=collectives) as watch:
        for _ in range(2):
            may_answer.clear()
            watch.beat()
            assert not read_records(tmp_path)
            may_answer.set()
            assert wait_for_record(tmp_path) == RECORD
        watch.expect_long_work()
        assert not read_records(tmp_path)
        watch.beat()
        assert wait_for_record(tmp_path) == RECORD, "an alarm that is sooner than the last one is heard"
    assert not list(tmp_path.iterdir())
    wait_until(lambda: "alarm" not in {thread.name for thread in threading.enumerate()})


def test_training_does_not_wait_for_a_recorder_that_does_not_answer(tmp_path: Path) -> None:
    asked, answer = threading.Event(), threading.Event()

    def collectives() -> RankRecord:
        asked.set()
        assert answer.wait(PATIENCE)
        return RECORD

    with StepWatch(tmp_path, rank=0, timeout_seconds=0.2, collectives=collectives) as watch:
        watch.beat()
        assert asked.wait(PATIENCE)
        begin = time.monotonic()
        watch.beat()
        assert time.monotonic() - begin < 50
        answer.set()
    assert not read_records(tmp_path), "what was found out too late is not told"


@contextmanager
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_torch_records_collectives_in_the_form_that_is_read(tmp_path: Path) -> None:
    with group_of_one():
        for _ in range(3):
            dist.all_reduce(torch.ones(2))
        wait_until(lambda: recorded_collectives("gloo").current is None)  # recorded a moment after it is done
        found = recorded_collectives("gloo")
    newest = found.collectives[-1]
    assert (newest.name, newest.paired, newest.done) == ("all_reduce", False, True)
    assert newest.group.endswith("(default_pg)")
    assert found.begun(newest.group) == newest.number >= 3
    assert found.current is None
