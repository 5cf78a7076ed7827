from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator

import pytest

from pantheraml.base.errors import DataError, WorkerError
from pantheraml.data.worker_pool import ordered_map


def slow_when_even(value: int) -> int:
    time.sleep(0.01 if value % 2 == 0 else 0)
    return value * value


def fail_at_three(value: int) -> int:
    if value == 3:
        raise DataError("three", where="here", fix="nothing")
    return value


def die_at_three(value: int) -> int:
    if value == 3:
        os._exit(9)
    return value


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 3, 20])
def test_results_come_in_order(workers: int, count: int) -> None:
    assert list(ordered_map(slow_when_even, range(count), workers)) == [value * value for value in range(count)]


def test_work_runs_in_other_processes() -> None:
    found = set(ordered_map(lambda _: os.getpid(), range(6), 2))
    assert len(found) == 2
    assert os.getpid() not in found


def test_children_tokenize_on_one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in ("true", None):
        if before is None:
            monkeypatch.delenv("TOKENIZERS_PARALLELISM")
        else:
            monkeypatch.setenv("TOKENIZERS_PARALLELISM", before)
        assert set(ordered_map(lambda _: os.environ["TOKENIZERS_PARALLELISM"], range(4), 2)) == {"false"}
        assert os.environ.get("TOKENIZERS_PARALLELISM") == before


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_is_raised_in_order_with_its_fields(workers: int) -> None:
    results = ordered_map(fail_at_three, range(10), workers)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError) as caught:
        next(results)
    assert (caught.value.what, caught.value.where, caught.value.fix) == ("three", "here", "nothing")


def test_a_worker_that_dies_is_reported() -> None:
    with pytest.raises(WorkerError, match="died"):
        list(ordered_map(die_at_three, range(10), 2))


def test_workers_ignore_signals_meant_for_the_parent() -> None:
    def signalled(value: int) -> int:
        os.kill(os.getpid(), signal.SIGUSR1)
        return value

    assert list(ordered_map(signalled, range(3), 2)) == [0, 1, 2]


def test_closing_early_kills_busy_workers() -> None:
    results = ordered_map(time.sleep, [0, 100, 100, 100], 2)
    next(results)
    started = time.monotonic()
    results.close()
    assert time.monotonic() - started < 50


def test_prefetch_is_limited() -> None:
    read: list[int] = []

    def items() -> Iterator[int]:
        for value in range(100):
            read.append(value)
            yield value

    results = ordered_map(slow_when_even, items(), 3)
    next(results)
    assert len(read) <= 4
    results.close()
