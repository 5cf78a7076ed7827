"""The event stream: typed events to JSON lines and back, while being written, after a crash, and from old files."""

from __future__ import annotations

import json
import math
import multiprocessing
import time
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from pantheraml.base.event_stream import FILE_NAME, EventReader, EventWriter, read_events
from pantheraml.base.events import (
    KINDS,
    ErrorRaised,
    EvalDone,
    Event,
    IncidentRecorded,
    Notice,
    RunStarted,
    UnknownEvent,
    event_schema,
)


def messages(reader: EventReader) -> list[str]:
    return [event.message for event in reader.poll() if isinstance(event, Notice)]


def test_events_come_back_as_written(tmp_path: Path) -> None:
    with EventWriter(tmp_path, rank=3) as emit:
        emit(Notice(message="ünïcode\nand a line break"))
    (event,) = read_events(tmp_path)
    assert isinstance(event, Notice)
    assert event.message == "ünïcode\nand a line break"
    assert (event.v, event.rank, event.kind) == (1, 3, "notice")


def test_an_event_without_a_required_field_is_refused() -> None:
    with pytest.raises(ValidationError, match="message"):
        Notice()  # type: ignore[call-arg]


def test_an_incident_keeps_the_rank_that_caused_it(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"step": 1, "path": "p", "finding": "f", "module": None, "tensor": None, "samples": None}
    with EventWriter(tmp_path, rank=0) as emit:
        emit(IncidentRecorded(rank=2, **fields))
        emit(IncidentRecorded(rank=None, **fields))
    assert [event.rank for event in read_events(tmp_path)] == [2, None]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_valid_json_and_come_back(tmp_path: Path, value: float) -> None:
    with EventWriter(tmp_path) as emit:
        emit(EvalDone(step=1, loss=value, perplexity=1.0, target_tokens=1, seconds=1.0))
    json.loads((tmp_path / FILE_NAME).read_text(), parse_constant=lambda _: pytest.fail("not JSON"))
    (event,) = read_events(tmp_path)
    assert isinstance(event, EvalDone)
    assert repr(event.loss) == repr(value)


def test_a_line_cut_by_a_crash_loses_nothing_else(tmp_path: Path) -> None:
    with EventWriter(tmp_path) as emit:
        emit(Notice(message="one"))
    with open(tmp_path / FILE_NAME, "ab") as file:
        file.write(b'{"v":1,"kind":"noti')
    reader = EventReader(tmp_path)
    assert messages(reader) == ["one"]
    with EventWriter(tmp_path) as emit:
        emit(Notice(message="two"))
    assert messages(reader) == ["two"]
    assert reader.damaged_lines == 1


def test_lines_that_nobody_wrote_are_damaged(tmp_path: Path) -> None:
    """Of a stream from somebody else: nesting without end, and times that are no dates."""
    with EventWriter(tmp_path) as emit:
        emit(Notice(message="one"))
    line = '{"v":1,"kind":"notice","message":"x","time":%s,"clock":%s}\n'
    with open(tmp_path / FILE_NAME, "a") as file:
        file.write('{"v":1,"kind":"notice","message":' + "[" * 200_000 + "\n")
        for times in (("1e18", "1"), ("-5", "1"), ("NaN", "1"), ("1", "Infinity")):
            file.write(line % times)
    reader = EventReader(tmp_path)
    assert messages(reader) == ["one"]
    assert reader.damaged_lines == 5


def test_a_reader_sees_each_event_once_while_it_is_written(tmp_path: Path) -> None:
    reader = EventReader(tmp_path)
    assert list(reader.poll()) == []
    seen = []
    with EventWriter(tmp_path) as emit:
        for i in range(5):
            emit(Notice(message=str(i)))
            seen += messages(reader)
    assert seen == list("01234")


def _write_many(folder: str, rank: int) -> None:
    with EventWriter(Path(folder), rank=rank) as emit:
        for i in range(200):
            emit(Notice(message=f"{rank}-{i}-" + "x" * 5000))


def test_writers_in_several_processes_do_not_mix_lines(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(str(tmp_path), rank)) for rank in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    reader = EventReader(tmp_path)
    events = list(reader.poll())
    assert reader.damaged_lines == 0
    assert len(events) == 600
    for rank in range(3):
        own = [e.message.split("-")[1] for e in events if isinstance(e, Notice) and e.rank == rank]
        assert own == [str(i) for i in range(200)]


def test_the_time_between_events_survives_a_change_of_the_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EventWriter(tmp_path) as emit:
        emit(Notice(message="before"))
        monkeypatch.setattr(time, "time", lambda: 0.0)
        emit(Notice(message="after"))
    before, after = read_events(tmp_path)
    assert after.time < before.time
    assert 0 <= after.moment - before.moment < 60


OLD_LINES = [
    '{"v":1,"time":5.0,"rank":0,"kind":"run.started","command":"train","pantheraml":"0.1.0","output":"runs/x"}',
    '{"v":1,"time":6.0,"clock":1.5,"rank":1,"kind":"error","error":"DataError","what":"w","where":null,'
    '"todo":"Do it.","exit_code":3}',
    '{"v":1,"time":6.0,"clock":1.5,"rank":0,"kind":"eval.done","step":3,"loss":"nan","perplexity":"inf",'
    '"target_tokens":5,"seconds":0.1}',
    '{"v":2,"time":7.0,"clock":2.5,"rank":0,"kind":"from.the.future","answer":42}',
]


def test_streams_of_other_versions_are_read(tmp_path: Path) -> None:
    """Without a monotonic clock, with `todo` for `fix`, with 'nan', and with kinds that this version does not know."""
    (tmp_path / FILE_NAME).write_text("\n".join(OLD_LINES) + "\n")
    started, error, done, unknown = read_events(tmp_path)
    assert isinstance(started, RunStarted)
    assert started.moment == 5.0
    assert isinstance(error, ErrorRaised)
    assert error.fix == "Do it."
    assert isinstance(done, EvalDone)
    assert math.isnan(done.loss)
    assert done.perplexity == math.inf
    assert isinstance(unknown, UnknownEvent)
    assert unknown.kind == "from.the.future"


def test_the_schema_has_every_kind() -> None:
    assert set(get_args(Event)) == set(KINDS.values())
    assert set(event_schema()["discriminator"]["mapping"]) == set(KINDS)
