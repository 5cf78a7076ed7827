"""`pantheraml gpus`: table, JSON and live view, on hosts with and without GPUs."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import pynvml
import pytest
from rich.console import Console
from rich.text import Text

from pantheraml.cli import gpus
from pantheraml.cli.gpu_table import LINE_COLUMNS, GPUTable, bar, describe_links, runs, sparkline
from pantheraml.cli.main import main
from pantheraml.devices.background import take_once
from pantheraml.devices.fake_nvml import FakeNvml
from pantheraml.devices.inventory import take_inventory

Host = Callable[..., FakeNvml]
GIB = 2**30


def drawn(width: int = 130, **options: Any) -> str:
    stream = io.StringIO()
    samples = options.pop("samples", (take_once(),))
    Console(file=stream, width=width).print(GPUTable(take_inventory(), samples=samples, **options))
    return stream.getvalue()


def busy_host(host: Host) -> FakeNvml:
    fake = host("4xH200")
    for gpu in fake.gpus:
        gpu.utilization, gpu.power_watts, gpu.used_bytes, gpu.reasons = 87, 612.0, 98 * GIB, 0x4
    fake.gpus[1].temperature = 83
    fake.gpus[2].ecc = (0, 2)
    fake.gpus[0].processes = [(os.getpid(), 97 * GIB), (2**22 - 3, GIB)]
    return fake


def test_the_table(host: Host) -> None:
    busy_host(host)
    lines = [line.rstrip() for line in drawn().splitlines()]
    assert "driver 580.95.05 · CUDA 13.0" in lines[0]
    rows = [line for line in lines if "H200" in line]
    assert rows[0].split() == [
        *("0", "H200", "●", "ok", "████████▊·", "87", "%", "███████···", "98.0/139", "GiB", "34", "°C", "612/700", "W"),
        *("1,980", "MHz"),
    ]
    assert [row.split()[3] for row in rows] == ["ok", "warn", "fail", "ok"]
    text = "\n".join(lines)
    assert text.index("GPU 2: 2 uncorrected ECC error(s)") < text.index("GPU 1: 4 °C below its slowdown temperature")
    assert "GPU 0-3: clocks limited by software power cap, which is normal under load" in text
    assert "links: NVLink (18 links each) between all GPUs" in text
    own, foreign = [line.split() for line in lines if line.strip().startswith("0 ")][1:]
    assert own[:4] == ["0", "97", "GiB", str(os.getpid())]
    assert foreign == ["0", "1", "GiB", str(2**22 - 3), "–", "–"]


@pytest.mark.parametrize("width", [200, 118, 100, 80, 60])
def test_it_fits_the_terminal(host: Host, width: int) -> None:
    busy_host(host)
    text = drawn(width, watching=True)
    assert max(map(len, text.splitlines())) <= width
    rows = [line for line in text.splitlines() if "H200" in line]
    assert len(rows) == 4
    for row in rows:  # whatever else is left out
        for cell in ("98.0/139 GiB", "87 %", "°C"):
            assert cell in row
    assert ("MHz" in text) == (width >= 118)
    assert ("612/700 W" in text) == (width >= 80)


def test_what_is_not_known_is_a_dash(host: Host) -> None:
    fake = host("2xH200")
    fake.gpus[0].lost = pynvml.NVML_ERROR_GPU_IS_LOST
    lost = next(line for line in drawn().splitlines() if "unknown" in line)
    assert lost.split() == ["0", "unknown", "✖", "fail", "–", "–", "–", "–", "–"]


def test_a_host_without_gpus(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    host("cpu 4 cores")
    assert main(["gpus"]) == 0
    text = capsys.readouterr().out
    assert "No GPU: no NVIDIA driver" in text
    assert f"CPU: {take_inventory().cpu_count} cores" in text
    assert "RAM: " in text


def test_names_cannot_control_the_terminal(host: Host) -> None:
    host("1xH200").gpus[0].name = "NVIDIA \x1b[2Jevil"
    assert "\x1b" not in drawn()
    assert "\\x1b[2Jevil" in drawn()


def test_json(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    busy_host(host)
    assert main(["gpus", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) >= {"gpus", "cpu_count", "ram_bytes", "driver", "note", "connections", "cuda"}
    gpu = found["gpus"][2]
    assert gpu["health"] == {"status": "fail", "reasons": ["2 uncorrected ECC error(s) since the driver was loaded"]}
    assert (gpu["now"]["utilization_percent"], gpu["now"]["power_watts"]) == (87, 612.0)
    assert found["connections"][0] == [None, "NVLink", "NVLink", "NVLink"]


def stop_after(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    waits = iter(range(times - 1))

    def sleep(seconds: float) -> None:
        if next(waits, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(gpus.time, "sleep", sleep)


def test_watching_as_json(host: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    host("2xH200")
    stop_after(monkeypatch, 3)
    assert main(["gpus", "--watch", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(len(json.loads(line)["gpus"]) == 2 for line in lines)


def test_watching_on_a_terminal(
    host: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = busy_host(host)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    stop_after(monkeypatch, 3)
    assert main(["gpus", "--watch"]) == 0
    assert "Ctrl-C ends" in capsys.readouterr().out
    assert fake.open_sessions == 0


def test_watching_needs_a_terminal(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    host("1xH200")
    assert main(["gpus", "--watch"]) == 2
    assert "--json" in capsys.readouterr().err


def test_bars() -> None:
    drawn = [bar(share, 4).plain for share in (0, 0.03, 0.5, 0.53, 1, 7)]
    assert drawn == ["····", "▏···", "██··", "██▏·", "████", "████"]
    assert bar(0.25, 4).spans[0].style == "dim", "the empty part"
    assert isinstance(bar(0.5), Text)


def test_sparklines() -> None:
    assert sparkline([]) == ""
    assert sparkline([(0.0, 0), (4.0, 50), (8.0, 100), (12.0, None), (16.0, 30)]) == "▁▅█ ▃"
    assert sparkline([(8.1, 0), (9.1, 100), (10.1, 50)]) == "▅", "the mean of four seconds"
    minute = [(float(second), 37.0 * second % 100) for second in range(61)]
    assert len(sparkline(minute[:60])) == len(sparkline(minute)) == LINE_COLUMNS
    assert sparkline(minute)[:-1] == sparkline(minute[:60])[1:], "columns move as they are"


def test_number_runs() -> None:
    assert [runs(numbers) for numbers in ([], [3], [0, 1, 2], [5, 0, 1, 7, 6])] == ["", "3", "0-2", "0-1, 5-7"]


def test_links_in_words(host: Host) -> None:
    host("4xA100-80GB pcie")
    assert describe_links(take_inventory()) == "links: 2 pairs by PCIe switch, 4 pairs by NUMA node"
    host("1xH200")
    assert describe_links(take_inventory()) == ""
    fake = host("2xH200")
    fake.gpus[0].inactive_links = 3
    assert describe_links(take_inventory()) == "links: NVLink between all GPUs"
