from __future__ import annotations

from pathlib import Path

import pytest

from pantheraml.base.errors import ConfigError
from pantheraml.planner.rates import MachineRates, load_rates, rates_as_json, rates_file

SHEET = MachineRates(
    device="Test GPU", matmul_tflops={"bf16": 500.0, "fp8": 900.0}, copy_gb_s=2000.0, source="data sheet"
)


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PANTHERAML_CACHE", str(tmp_path))
    path = rates_file("Test GPU")
    path.parent.mkdir(parents=True)
    return path


def test_without_a_calibration_the_other_rates_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PANTHERAML_CACHE", str(tmp_path))
    assert load_rates("Test GPU") is None
    assert load_rates("Test GPU", otherwise=SHEET) is SHEET


def test_a_calibration_replaces_what_it_measured(stored: Path) -> None:
    measured = MachineRates(device="Test GPU", matmul_tflops={"bf16": 640.0}, launch_us=4.0, source="measured here")
    stored.write_text(rates_as_json(measured))
    assert load_rates("Test GPU") == measured
    both = load_rates("Test GPU", otherwise=SHEET)
    assert both is not None
    assert both.matmul_tflops == {"bf16": 640.0, "fp8": 900.0}
    assert (both.copy_gb_s, both.launch_us, both.watts) == (2000.0, 4.0, None)
    assert both.source == "measured here; copy_gb_s, matmul_tflops.fp8: data sheet"


@pytest.mark.parametrize(
    "content",
    [
        b'{"device": "Test GPU"',
        b"\xff\xfe",
        b'{"device": "Test GPU", "source": "x", "copy_gb_s": 0}',
        b'{"device": "Test GPU", "source": "x", "matmul_tflops": {"bf16": NaN}}',
    ],
)
def test_a_broken_file_is_named(stored: Path, content: bytes) -> None:
    stored.write_bytes(content)
    with pytest.raises(ConfigError, match="bench --calibrate"):
        load_rates("Test GPU")
