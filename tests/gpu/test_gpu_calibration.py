"""Rates that are measured here are below the peaks of the data sheet, and the planner reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pantheraml.devices.probe import probe
from pantheraml.planner.known_rates import peak_rates, rates_of
from pantheraml.runs.calibration import calibrate
from pantheraml.specs.gpu_table import by_driver_name


def test_measured_rates_are_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PANTHERAML_CACHE", str(tmp_path))
    (rates, path), *_ = calibrate(seconds=0.3)
    name = probe().gpus[0].name
    assert rates.device == name
    assert path.is_file()
    assert rates_of(name) is not None
    assert rates.copy_gb_s is not None
    assert rates.attention_tflops is not None
    assert rates.host_gb_s is not None
    assert rates.matmul_tflops["bf16"] > rates.matmul_tflops["fp32"] > 0
    model = by_driver_name(name)
    if model is None:
        pytest.skip(f"the peaks of {name} are not known")
    peaks = peak_rates(model)
    for form, peak in peaks.matmul_tflops.items():
        assert rates.matmul_tflops.get(form, 0.0) < 1.02 * peak
    assert peaks.copy_gb_s is None or rates.copy_gb_s < 1.05 * peaks.copy_gb_s
