"""The follower passes on every event once, and a failing reader affects neither the run nor other readers."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.event_stream import EventWriter
from pantheraml.base.events import EventBase, Notice
from pantheraml.readers.follow import Follower
from pantheraml.readers.sinks.sink import Sink


class Collector:
    def __init__(self) -> None:
        self.messages: list[str] = []
        self.closed = 0

    def handle(self, event: EventBase) -> None:
        self.messages.append(event.message)

    def close(self) -> None:
        self.closed += 1


class Faulty(Collector):
    def handle(self, event: EventBase) -> None:
        super().handle(event)
        raise ConnectionError("the server is gone")

    def __str__(self) -> str:
        return "the faulty one"


class BadEnd(Collector):
    def close(self) -> None:
        super().close()
        raise OSError("cannot flush")


@pytest.mark.seed("S3-073", "S4-144")
def test_new_events_are_passed_on_once(tmp_path: Path) -> None:
    collector = Collector()
    follower = Follower(tmp_path, [collector])
    assert follower.poll() == [], "the stream does not exist yet"
    with EventWriter(tmp_path) as emit:
        emit(Notice(message="one"))
        assert [event.message for event in follower.poll()] == ["one"]
        emit(Notice(message="two"))
        emit(Notice(message="three"))
        follower.poll()
        emit(Notice(message="last"))
    follower.close()
    assert collector.messages == ["one", "two", "three", "last"], "closing passes on the rest"
    assert collector.closed == 1


def test_follower_can_start_at_the_end(tmp_path: Path) -> None:
    collector = Collector()
    with EventWriter(tmp_path) as emit:
        emit(Notice(message="old"))
        follower = Follower(tmp_path, [collector], from_end=True)
        emit(Notice(message="new"))
    follower.close()
    assert collector.messages == ["new"]


def test_failing_reader_is_disabled_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    faulty, healthy = Faulty(), Collector()
    follower = Follower(tmp_path, [faulty, healthy])
    with EventWriter(tmp_path) as emit, caplog.at_level(logging.WARNING, "pantheraml"):
        for message in ("one", "two"):
            emit(Notice(message=message))
        assert len(follower.poll()) == 2
        follower.close()
    assert (faulty.messages, faulty.closed) == (["one"], 1)
    assert (healthy.messages, healthy.closed) == (["one", "two"], 1)
    (record,) = caplog.records
    expected = "the faulty one is disabled for the rest of this run: ConnectionError: the server is gone"
    assert record.getMessage() == expected


def test_all_readers_are_closed_if_one_fails_to_close(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad, good = BadEnd(), Collector()
    with caplog.at_level(logging.WARNING, "pantheraml"):
        Follower(tmp_path, [bad, good]).close()
    assert good.closed == 1
    assert "cannot flush" in caplog.text


class SlowBackend:
    """Blocks until released, like the client of an unresponsive server."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.logged: list[int] = []
        self.status: str | None = None

    def log(self, step: int, seconds: float, metrics: dict[str, float]) -> None:
        assert self.release.wait(100)
        self.logged.append(step)

    def finish(self, status: str) -> None:
        self.status = status


class GoneBackend(SlowBackend):
    def log(self, step: int, seconds: float, metrics: dict[str, float]) -> None:
        raise ConnectionError("no route to host")


def test_slow_sink_does_not_block_the_run(fake_run: Any, tmp_path: Path) -> None:
    fake_run.train(1, 50)
    fake_run.finish(50)
    backend = SlowBackend()
    follower = Follower(fake_run.write(tmp_path), [Sink("slow", backend)])
    begin = time.monotonic()
    assert len(follower.poll()) == len(fake_run.events)
    assert time.monotonic() - begin < 50
    assert backend.logged == []
    backend.release.set()
    follower.close()
    assert backend.logged == list(range(1, 51)), "nothing was lost"
    assert backend.status == "succeeded"


def test_sink_with_an_unreachable_server_is_disabled(
    fake_run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake_run.train(1, 1)
    sink = Sink("gone", GoneBackend())
    follower = Follower(fake_run.write(tmp_path), [sink])
    with EventWriter(tmp_path) as emit, caplog.at_level(logging.WARNING, "pantheraml"):
        deadline = time.monotonic() + 100
        while not caplog.records and time.monotonic() < deadline:
            emit(Notice(message="the run goes on"))
            follower.poll()
        follower.close()
    (record,) = caplog.records
    assert record.getMessage().startswith("the sink 'gone' is disabled")
    assert "no route to host" in record.getMessage()
