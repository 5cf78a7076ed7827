"""A process that gets on says so; one that does not leaves its stacks, and the collectives that it is in."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pantheraml.engine.guard.collectives import recorded_collectives
from pantheraml.engine.guard.watch import LONG_WORK_SECONDS, StepWatch
from pantheraml.launch.flight_record import Collective, RankRecord, read_records

RECORD = RankRecord((Collective("all_reduce", 3, "0", paired=False, done=False, begun_ns=1),))


def wait_for_stacks(file: Path) -> str:
    deadline = time.monotonic() + 10
    while not (text := file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return text


def wait_for_record(folder: Path) -> RankRecord:
    deadline = time.monotonic() + 10
    while not (records := read_records(folder)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return records[0]


def test_stacks_come_late_and_go_when_it_gets_on(tmp_path: Path) -> None:
    file = tmp_path / "rank-3.txt"
    with StepWatch(tmp_path, rank=3, timeout_seconds=0.2) as watch:
        watch.beat()
        assert file.read_text() == ""
        assert "wait_for_stacks" in wait_for_stacks(file)
        watch.beat()
        assert file.read_text() == ""
    assert not list(tmp_path.iterdir()), "nothing is left of a run that came to its end"


def test_the_file_is_there_from_the_beginning(tmp_path: Path) -> None:
    """Of a rank that is suspended there is nothing else."""
    with StepWatch(tmp_path, rank=1, timeout_seconds=100.0):
        assert (tmp_path / "rank-1.txt").read_text() == ""


def test_long_work_may_take_long_but_not_for_ever(tmp_path: Path) -> None:
    file = tmp_path / "rank-0.txt"
    with StepWatch(tmp_path, rank=0, timeout_seconds=0.1, long_work_seconds=1.2) as watch:
        time.sleep(0.3)
        assert file.read_text() == "", "until the first beat the model is loaded"
        assert wait_for_stacks(file)
        watch.beat()
        watch.expect_long_work()
        assert file.read_text() == ""
        time.sleep(0.3)
        assert file.read_text() == ""
        assert wait_for_stacks(file)
        watch.beat()
        assert file.read_text() == ""
        assert wait_for_stacks(file)


def test_long_work_is_never_given_less_than_a_step(tmp_path: Path) -> None:
    with StepWatch(tmp_path, rank=0, timeout_seconds=100 * LONG_WORK_SECONDS, long_work_seconds=0.1):
        time.sleep(0.3)
        assert (tmp_path / "rank-0.txt").read_text() == ""


def test_heartbeats_are_fewer_than_beats(tmp_path: Path) -> None:
    told: list[Any] = []

    def hear(kind: str, /, **fields: Any) -> None:
        told.append((kind, fields))

    with StepWatch(tmp_path, rank=0, timeout_seconds=2.0, heartbeat=hear) as watch:
        watch.beat()
        assert not told, "nobody knows yet how far the run had come"
        begin = time.monotonic()
        watch.beat(7)
        while time.monotonic() - begin < 0.5:
            watch.beat()
    assert 2 <= len(told) <= 3, "one at the start, then every tenth of the timeout"
    assert told[-1] == ("heartbeat", {"step": 7})


def test_collectives_come_late_and_go_when_it_gets_on(tmp_path: Path) -> None:
    with StepWatch(tmp_path, rank=0, timeout_seconds=0.4, collectives=lambda: RECORD) as watch:
        for _ in range(2):
            watch.beat()
            assert not read_records(tmp_path)
            assert wait_for_record(tmp_path) == RECORD
        watch.expect_long_work()
        assert not read_records(tmp_path)
        watch.beat()
        assert wait_for_record(tmp_path) == RECORD, "an alarm that is sooner than the last one is heard"
    assert not list(tmp_path.iterdir())
    assert "collectives" not in {thread.name for thread in threading.enumerate()}


def test_training_does_not_wait_for_a_recorder_that_does_not_answer(tmp_path: Path) -> None:
    asked, answer = threading.Event(), threading.Event()

    def collectives() -> RankRecord:
        asked.set()
        answer.wait(10)
        return RECORD

    with StepWatch(tmp_path, rank=0, timeout_seconds=0.2, collectives=collectives) as watch:
        watch.beat()
        assert asked.wait(10)
        begin = time.monotonic()
        watch.beat()
        assert time.monotonic() - begin < 5
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
        found = recorded_collectives("gloo")
    newest = found.collectives[-1]
    assert (newest.name, newest.paired, newest.done) == ("all_reduce", False, True)
    assert newest.group.endswith("(default_pg)")
    assert found.begun(newest.group) == newest.number >= 3
    assert found.current is None
