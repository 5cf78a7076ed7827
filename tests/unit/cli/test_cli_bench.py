"""`pantheraml bench` runs the benchmarks of its own checkout, and no script from the current folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from pantheraml.base.errors import ConfigError
from pantheraml.cli import bench
from pantheraml.cli.main import main
from pantheraml.planner.rates import load_rates, rates_file
from pantheraml.runs.calibration import calibrate


def test_a_suite_of_the_current_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Path(bench.__file__).parents[3] / "benchmarks" / "suite.py"
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "suite.py").write_text("raise SystemExit('ran')")
    (tmp_path / "deeper").mkdir()
    monkeypatch.chdir(tmp_path / "deeper")
    assert bench.find_script() == own
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "venv/lib/site-packages/pantheraml/cli/bench.py"))
    with pytest.raises(ConfigError, match="not part of the installed package"):
        bench.find_script()


def test_calibration_stores_what_the_planner_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, in a process with torch."""
    monkeypatch.setenv("PANTHERAML_CACHE", str(tmp_path))
    ((rates, path),) = calibrate(cpu=True, seconds=0.05)
    assert path == rates_file("cpu")
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.is_file()
    assert load_rates("cpu") == rates
    assert rates.matmul_tflops.keys() == {"fp32"}
    assert rates.matmul_tflops["fp32"] > 0
    assert rates.copy_gb_s is not None
    assert rates.attention_tflops is not None
    assert (rates.link_gb_s, rates.host_gb_s, rates.watts) == (None, None, None)
    assert "bench --calibrate" in rates.source


@pytest.mark.parametrize("arguments", [["bench"], ["bench", "--suite", "smoke", "--calibrate"]])
def test_bench_does_one_thing(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "--calibrate" in capsys.readouterr().err
