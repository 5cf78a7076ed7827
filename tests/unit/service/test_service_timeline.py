"""GPUs and host over a job's time, read piece by piece from its event stream."""

from __future__ import annotations

from pathlib import Path

from pantheraml.base.event_stream import FILE_NAME, EventWriter
from pantheraml.base.events import GPUIdentity, HardwareFound, HardwareSampled, TrainStep
from pantheraml.service.jobs import timeline as module
from pantheraml.service.jobs.timeline import POINTS, timeline


def sample(utilization: float) -> HardwareSampled:
    return HardwareSampled(
        seconds=1.0, samples=4, indices=[0], utilization_percent=[utilization], cpu_percent=20.0, ram_bytes=1 << 30
    )


def step(number: int) -> TrainStep:
    return TrainStep(
        step=number, epoch=0.1, loss=1.0, learning_rate=None, grad_norm=None, tokens=1, target_tokens=1, seconds=1.0,
        tokens_per_second=None, memory_bytes=None,
    )  # fmt: skip


def test_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    assert timeline(tmp_path, 0) == {"gpus": None, "samples": [], "cursor": 0, "complete": True}
    gpu = GPUIdentity(index=0, name="H200", uuid=None, total_bytes=141 << 30, power_limit_watts=700.0)
    with EventWriter(tmp_path) as emit:
        emit(HardwareFound(host="here", driver="580", cuda=None, gpus=[gpu], cpu_count=2, ram_bytes=1 << 34))
        emit(step(1))
        emit(sample(50.0))
    first = timeline(tmp_path, 0)
    assert [each["name"] for each in first["gpus"]] == ["H200"]
    assert [each["utilization_percent"] for each in first["samples"]] == [[50.0]]
    stream = tmp_path / FILE_NAME
    assert first["cursor"] == stream.stat().st_size
    with EventWriter(tmp_path) as emit:
        emit(sample(70.0))
    whole = stream.read_bytes()
    stream.write_bytes(whole[:-5])  # being written
    assert timeline(tmp_path, first["cursor"])["samples"] == []
    stream.write_bytes(whole + b'{"kind":"hardware.sampled"}\nnonsense\n')
    later = timeline(tmp_path, first["cursor"])
    assert [each["utilization_percent"] for each in later["samples"]] == [[70.0]]
    assert later["gpus"] is None


def test_many_are_thinned_and_long_streams_come_in_pieces(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    with EventWriter(tmp_path) as emit:
        for number in range(3 * POINTS):
            emit(sample(float(number)))
    assert len(timeline(tmp_path, 0)["samples"]) == POINTS
    monkeypatch.setattr(module, "MOST_BYTES", 100_000)
    cursor, pieces, complete = 0, 0, False
    while not complete:
        found = timeline(tmp_path, cursor)
        cursor, complete, pieces = found["cursor"], found["complete"], pieces + 1
    assert pieces > 5
    assert cursor == (tmp_path / FILE_NAME).stat().st_size
