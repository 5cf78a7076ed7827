"""`pantheraml bench` runs the benchmarks of its own checkout, and no script from the current folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from pantheraml.base.errors import ConfigError
from pantheraml.cli import bench


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
