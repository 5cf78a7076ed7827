"""GPUs and host in run.json and in the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.event_stream import read_events
from pantheraml.readers.report import write_report
from pantheraml.readers.report_hardware import hardware_charts
from pantheraml.readers.summary import summarize
from tests.unit.readers.test_readers_report import Page

GIB = 2**30


def sampled(run: Any, *, seconds: float = 10.0, indices: tuple[int, ...] = (0, 2), **changes: Any) -> None:
    count = len(indices)
    fields: dict[str, Any] = {
        "utilization_percent": [90] * count,
        "memory_bytes": [60 * GIB] * count,
        "temperature_celsius": [61] * count,
        "memory_temperature_celsius": [None] * count,
        "power_watts": [600] * count,
        "sm_clock_mhz": [1980] * count,
        "energy_joules": [6000.0] * count,
        "nvlink_bytes": [5] * count,
        "pcie_bytes": [None] * count,
        "event_reasons": [["software power cap"]] * count,
    }
    run.emit("hardware.sampled", after=seconds, seconds=seconds, samples=10, indices=list(indices), cpu_percent=40.0,
             ram_bytes=8 * GIB, **{**fields, **changes})  # fmt: skip


def found(run: Any, *indices: int) -> None:
    gpus = [
        {"index": i, "name": "NVIDIA H200", "uuid": f"GPU-{i}", "total_bytes": 140 * GIB, "power_limit_watts": 700,
         "health": "ok"} for i in indices
    ]  # fmt: skip
    run.emit("hardware.found", host="node<7>", driver="580", cuda="13.0", gpus=gpus, cpu_count=96, ram_bytes=2**40)


@pytest.mark.seed("S4-030", "S4-031", partly="needs several GPUs; a run measures its own utilization")
@pytest.mark.seed("S4-145")
def test_utilization_and_energy_of_the_whole_run(fake_run: Any) -> None:
    fake_run.begin()
    sampled(fake_run, seconds=30.0)
    sampled(fake_run, seconds=10.0, utilization_percent=[50, 10], energy_joules=[1000.5, 2000.0])
    summary = summarize(fake_run.events)
    # 0: (30 * 90 + 10 * 50) / 40 = 80, 2: (30 * 90 + 10 * 10) / 40 = 70
    assert summary["gpu_utilization_percent"] == 75.0
    assert summary["energy_joules"] == 15_000.5


def test_a_part_of_the_energy_is_not_the_energy(fake_run: Any) -> None:
    sampled(fake_run, energy_joules=[5.0, None])
    assert summarize(fake_run.events)["energy_joules"] is None


def test_a_run_on_cpus_has_neither(fake_run: Any, tmp_path: Path) -> None:
    fake_run.begin()
    for _ in range(3):
        sampled(fake_run, indices=())
    summary = summarize(fake_run.events)
    assert (summary["gpu_utilization_percent"], summary["energy_joules"]) == (None, None)
    page = Page(write_report(fake_run.write(tmp_path / "run")))
    assert "Host CPU, %" in page.text
    assert "GPU utilization, %" not in page.text
    assert len(page.charts) == 2


@pytest.mark.seed("S1-009", "S4-004", "S4-131")
def test_the_report_shows_a_timeline_and_a_table(complete: Any, tmp_path: Path) -> None:
    found(complete, 0, 2)
    sampled(complete, seconds=60.0)
    sampled(
        complete, seconds=60.0, utilization_percent=[70, None], temperature_celsius=[66, 60], energy_joules=[4e6, 1.0]
    )
    complete.emit("gpu.health", index=2, status="warn", reasons=["5 °C below <slow>"])
    page = Page(write_report(complete.write(tmp_path / "run")))
    assert "node<7> · 96 CPU cores · 1 TiB RAM · driver 580 · CUDA 13.0" in page.words
    at = page.text.index("NVIDIA H200")
    assert page.text[at - 1 : at + 8] == [
        "0", "NVIDIA H200", "80 %", "60 GiB of 140 GiB", "66 °C", "600 W", "1.11 kWh",
        "software power cap (2:00)", "ok",
    ]  # fmt: skip
    assert "warn: 5 °C below <slow>" in page.text
    assert "health of GPU 2 is warn: 5 °C below <slow>" in page.text
    # six charts of training come first
    titles = [text for text in page.text if text.startswith(("GPU ", "Host "))][:6]
    assert len(page.charts) == 6 + len(titles) == 12
    load = page.charts[6]
    assert (load["x"], load["top"], page.charts[0]["x"]) == ("minutes", 100.0, "step")
    assert [series["name"] for series in load["series"]] == ["GPU 0", "GPU 2", "mean"]
    assert load["series"][0]["x"] == [1, 2]
    assert [series["y"] for series in load["series"]] == [[90, 70], [90, None], [90, 70]]
    assert not any(series["legend"] for series in load["series"])


def test_a_pause_between_starts_is_a_gap(fake_run: Any) -> None:
    fake_run.begin()
    sampled(fake_run, indices=(0,))
    fake_run.now += 86_400
    fake_run.begin()
    sampled(fake_run, indices=(0,))
    (load, *_) = hardware_charts(fake_run.events)
    assert [series.name for series in load.series] == ["GPU 0"]
    assert load.series[0].points == [(0.1667, 90.0), (0.1667, None), (0.3333, 90.0)]


def test_long_runs_are_in_hours_and_gpus_may_change(fake_run: Any) -> None:
    sampled(fake_run, seconds=7200.0, indices=(0, 1))
    sampled(fake_run, seconds=7200.0, indices=(1,))
    load = hardware_charts(fake_run.events)[0]
    assert load.x == "hours"
    assert load.series[0].points == [(2.0, 90.0), (4.0, None)]
    assert load.series[1].points == [(2.0, 90.0), (4.0, 90.0)]


def test_what_no_gpu_tells_is_not_drawn(fake_run: Any) -> None:
    sampled(fake_run, power_watts=[None, None])
    assert "GPU power, W" not in [chart.title for chart in hardware_charts(fake_run.events)]


def test_events_without_a_column_are_read(fake_run: Any, tmp_path: Path) -> None:
    """Fields may be added, so that older streams lack them."""
    fake_run.emit("hardware.sampled", seconds=5, samples=1, indices=[0], cpu_percent=None, ram_bytes=1)
    events = read_events(fake_run.write(tmp_path / "run"))
    assert summarize(events)["energy_joules"] is None
    assert [chart.title for chart in hardware_charts(events)] == ["Host memory in use, GiB"]
    write_report(tmp_path / "run")


@pytest.mark.parametrize("status", ["warn", "fail", "ok"])
def test_the_progress_display_tells_of_health(fake_run: Any, reading: Any, status: str) -> None:
    import io

    from rich.console import Console

    from pantheraml.readers.progress import ProgressBar

    stream = io.StringIO()
    bar = reading(ProgressBar(console=Console(file=stream, width=100)))
    bar.handle(fake_run.emit("gpu.health", index=3, status=status, reasons=["hot"] if status != "ok" else []))
    expected = "health of GPU 3 is ok" if status == "ok" else f"warning: health of GPU 3 is {status}: hot"
    assert expected in stream.getvalue()
