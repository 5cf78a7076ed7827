from __future__ import annotations

import json
import math
import multiprocessing
import time
from pathlib import Path

import pytest

from pantheraml.base.events import FILE_NAME, EventReader, EventWriter, moment, number, read_events


def test_events_come_back_as_written(tmp_path: Path) -> None:
    with EventWriter(tmp_path, rank=3) as emit:
        emit("notice", message="ünïcode\nand a line break")
    (event,) = read_events(tmp_path)
    assert event["message"] == "ünïcode\nand a line break"
    assert (event["v"], event["rank"], event["kind"]) == (1, 3, "notice")


def test_an_event_without_a_required_field_is_refused(tmp_path: Path) -> None:
    with EventWriter(tmp_path) as emit, pytest.raises(AssertionError, match="message"):
        emit("notice")
    assert read_events(tmp_path) == []


def test_nan_is_valid_json_and_comes_back(tmp_path: Path) -> None:
    with EventWriter(tmp_path) as emit:
        emit("notice", message="m", loss=math.nan, more=[math.inf], deep={"x": -math.inf})
    json.loads((tmp_path / FILE_NAME).read_text(), parse_constant=lambda _: pytest.fail("not JSON"))
    (event,) = read_events(tmp_path)
    assert math.isnan(number(event["loss"]) or 0.0)
    assert number(event["more"][0]) == math.inf
    assert number(event["deep"]["x"]) == -math.inf


def test_a_line_cut_by_a_crash_loses_nothing_else(tmp_path: Path) -> None:
    with EventWriter(tmp_path) as emit:
        emit("notice", message="one")
    with open(tmp_path / FILE_NAME, "ab") as file:
        file.write(b'{"v":1,"kind":"noti')
    reader = EventReader(tmp_path)
    assert [e["message"] for e in reader.poll()] == ["one"]
    with EventWriter(tmp_path) as emit:
        emit("notice", message="two")
    assert [e["message"] for e in reader.poll()] == ["two"]
    assert reader.damaged_lines == 1


def test_a_reader_sees_each_event_once_while_it_is_written(tmp_path: Path) -> None:
    reader = EventReader(tmp_path)
    assert list(reader.poll()) == []
    seen = []
    with EventWriter(tmp_path) as emit:
        for i in range(5):
            emit("notice", message=str(i))
            seen += [e["message"] for e in reader.poll()]
    assert seen == list("01234")


def _write_many(folder: str, rank: int) -> None:
    with EventWriter(Path(folder), rank=rank) as emit:
        for i in range(200):
            emit("notice", message=f"{rank}-{i}-" + "x" * 5000)


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
        own = [e["message"].split("-")[1] for e in events if e["rank"] == rank]
        assert own == [str(i) for i in range(200)]


def test_the_time_between_events_survives_a_change_of_the_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EventWriter(tmp_path) as emit:
        emit("notice", message="before")
        monkeypatch.setattr(time, "time", lambda: 0.0)
        emit("notice", message="after")
    before, after = read_events(tmp_path)
    assert after["time"] < before["time"]
    assert 0 <= moment(after) - moment(before) < 60
