"""Telemetry events of a run: summaries, counters, health, and the size of the stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pantheraml.base.errors import StorageError
from pantheraml.base.event_stream import EventWriter, read_events
from pantheraml.base.events import EventBase, GPUHealthChanged, HardwareFound, HardwareSampled
from pantheraml.devices.background import HostSample
from pantheraml.devices.fake_nvml import FakeNvml
from pantheraml.devices.health import Health
from pantheraml.devices.sampler import GPUSnapshot
from pantheraml.runs.telemetry import RunTelemetry, interval, summarize

Host = Callable[..., FakeNvml]
GIB = 2**30
CUDA = (0, 3)
CPU = ()

SNAPSHOT = GPUSnapshot(
    index=0,
    total_bytes=80 * GIB,
    free_bytes=30 * GIB,
    utilization_percent=90,
    temperature_celsius=60,
    memory_temperature_celsius=70,
    power_watts=600.4,
    sm_clock_mhz=1980,
    event_reasons=(),
    energy_joules=1000.0,
    nvlink_tx_bytes=100,
    nvlink_rx_bytes=50,
    pcie_tx_bytes=10,
    pcie_rx_bytes=1,
)
UNKNOWN = GPUSnapshot(index=3, total_bytes=None, free_bytes=None, utilization_percent=None)


def sample(clock: float, *gpus: GPUSnapshot, cpu: float | None = 50.0, ram: int = GIB) -> HostSample:
    return HostSample(clock, cpu, ram, 64 * GIB, gpus)


class Samples:
    """What a BackgroundSampler has, by hand."""

    def __init__(self) -> None:
        self.kept: list[HostSample] = []
        self.judged: dict[int, Health] = {}
        self.running = False

    def start(self) -> None:
        self.running = True

    def stop(self) -> None:
        self.running = False

    def samples(self, *, after: float) -> list[HostSample]:
        return [each for each in self.kept if each.clock > after]

    def health(self) -> dict[int, Health]:
        return dict(self.judged)


def test_a_summary_over_an_interval() -> None:
    later = replace(
        SNAPSHOT,
        free_bytes=20 * GIB,
        utilization_percent=70,
        temperature_celsius=64,
        power_watts=500.0,
        sm_clock_mhz=1800,
        event_reasons=("software power cap",),
        energy_joules=1550.0,
        nvlink_tx_bytes=1100,
        nvlink_rx_bytes=1050,
        pcie_tx_bytes=30,
        pcie_rx_bytes=4,
    )
    before = sample(0.0, replace(SNAPSHOT, energy_joules=900.0), UNKNOWN)
    found = summarize([sample(1.0, SNAPSHOT, UNKNOWN), sample(2.0, later, UNKNOWN, cpu=None)], before, seconds=2.0)
    assert (found.seconds, found.samples, found.indices) == (2.0, 2, [0, 3])
    assert found.utilization_percent == [80, None]
    assert found.memory_bytes == [60 * GIB, None]
    assert found.temperature_celsius == [64, None]
    assert found.power_watts == [550, None]
    assert found.sm_clock_mhz == [1890, None]
    assert found.energy_joules == [650.0, None]  # since the sample before
    assert found.nvlink_bytes == [2000, None]
    assert found.pcie_bytes == [23, None]
    assert found.event_reasons == [["software power cap"], None]
    assert (found.cpu_percent, found.ram_bytes) == (50.0, GIB)


def test_a_counter_that_starts_again_is_not_known() -> None:
    fallen = replace(SNAPSHOT, energy_joules=5.0)
    found = summarize([sample(1.0, SNAPSHOT), sample(2.0, fallen)], None, seconds=1.0)
    assert found.energy_joules == [None]
    assert found.nvlink_bytes == [0]


def test_nothing_moved_is_known_and_no_reading_is_not() -> None:
    assert summarize([sample(1.0, SNAPSHOT)], sample(0.0, SNAPSHOT), seconds=1.0).energy_joules == [0.0]
    assert summarize([sample(1.0, SNAPSHOT)], None, seconds=1.0).energy_joules == [0.0]
    assert summarize([sample(1.0, UNKNOWN)], None, seconds=1.0).energy_joules == [None]


def test_intervals_grow_with_the_run() -> None:
    assert [interval(age) for age in (0, 60, 100, 1000, 3000, 86400)] == [1, 1, 1, 10, 30, 30]


def test_the_stream_stays_small() -> None:
    """Eight GPUs: a day is about 3 MB, whatever the number of samples."""
    gpus = [replace(SNAPSHOT, index=index, event_reasons=("software power cap",)) for index in range(8)]
    line = len(summarize([sample(1.0, *gpus)], None, seconds=1.0).model_dump_json())
    age, events = 0.0, 0
    while age < 86_400:
        age, events = age + interval(age), events + 1
    assert line < 1_100
    assert 2_800 < events < 3_400
    assert events * line < 3.7e6


@pytest.mark.seed("S1-010", "S4-013", "S4-141")
def test_a_run_on_gpus(host: Host, tmp_path: Path) -> None:
    fake = host("4xH200")
    samples = Samples()
    with EventWriter(tmp_path) as emit:
        telemetry = RunTelemetry(CUDA, emit, sampler=samples)  # type: ignore[arg-type]
        began = telemetry._began
        with telemetry:
            assert samples.running
            samples.kept = [sample(began + 0.1, SNAPSHOT)]
            telemetry.tick(began + 0.2)
            telemetry.tick(began + 0.3)  # nothing is due
            samples.kept += [sample(began + 1.1, SNAPSHOT), sample(began + 2.1, SNAPSHOT)]
            telemetry.tick(began + 2.2)
            samples.kept += [sample(began + 3.1, SNAPSHOT)]
        assert not samples.running
    first, *rest = read_events(tmp_path)
    assert isinstance(first, HardwareFound)
    assert [(gpu.index, gpu.name, gpu.health) for gpu in first.gpus] == [
        (0, "NVIDIA H200", "ok"),
        (3, "NVIDIA H200", "ok"),
    ]
    assert (first.driver, first.cuda) == ("580.95.05", "13.0")
    assert [(event.samples, event.seconds) for event in rest if isinstance(event, HardwareSampled)] == [
        (1, 0.1),
        (2, 2.0),
        (1, 1.0),  # the rest, at the end
    ]
    assert fake.open_sessions == 0


def test_changes_of_health(tmp_path: Path) -> None:
    found: list[EventBase] = []
    samples = Samples()
    telemetry = RunTelemetry(CPU, found.append, sampler=samples)  # type: ignore[arg-type]
    hot = Health(status="warn", reasons=("5 °C below",))
    for judged in (
        {0: Health(status="ok"), 3: hot},
        {0: Health(status="ok"), 3: hot},
        {0: hot, 3: Health(status="ok")},
    ):
        samples.judged = judged
        telemetry.flush()
    told = [(event.index, event.status, event.reasons) for event in found if isinstance(event, GPUHealthChanged)]
    assert told == [(3, "warn", ["5 °C below"]), (0, "warn", ["5 °C below"]), (3, "ok", [])]
    assert found[0].message == "health of GPU 3 is warn: 5 °C below"  # type: ignore[attr-defined]


def test_a_host_without_gpus(host: Host) -> None:
    host("cpu 4 cores")
    found: list[EventBase] = []
    with RunTelemetry(CPU, found.append) as telemetry:
        while not telemetry._sampler.taken:
            pass
    kinds = [event.kind for event in found]
    assert kinds == ["hardware.found", "hardware.sampled"]
    assert found[0].gpus == []  # type: ignore[attr-defined]
    assert found[1].indices == []  # type: ignore[attr-defined]
    assert found[1].ram_bytes > 0  # type: ignore[attr-defined]


def test_a_full_disk_ends_telemetry_and_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    def full(event: EventBase) -> None:
        raise StorageError("no space")

    with RunTelemetry(CPU, full) as telemetry:
        telemetry.tick()
    assert caplog.text.count("telemetry is no longer written: no space") == 1
