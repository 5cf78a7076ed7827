"""`pantheraml doctor`: with real processes and a real run, and with a torch that cannot be imported."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from pantheraml.base.errors import InstallationError
from tests.e2e.conftest import Playground


@pytest.mark.extended
@pytest.mark.seed("S0-117", "S3-010", "C19")
def test_two_processes_and_a_run(playground: Playground, tmp_path: Path) -> None:
    there = dataclasses.replace(playground, environment={**playground.environment, "TMPDIR": str(tmp_path)})
    ended = there("doctor", "--json")
    assert ended.code == 0, ended
    answer = json.loads(ended.out)
    checks = {check["name"]: check for check in answer["checks"]}
    assert answer["exit_code"] == 0
    assert checks["collective"]["values"]["processes"] >= 2
    assert checks["training"]["values"]["steps"] == 2
    assert checks["training"]["values"]["final_loss"] > 0
    assert checks["torch"]["values"]["version"] == checks["import torch"]["values"]["version"]
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_a_broken_torch_is_a_line(playground: Playground, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    there = dataclasses.replace(playground, environment={**playground.environment, "PYTHONPATH": str(tmp_path)})
    ended = there("doctor")
    assert ended.code == InstallationError.exit_code, ended
    assert "FAIL  import torch     ImportError: libcudart.so.13: cannot open shared object" in ended.out
    assert "not tried: torch does not work" in ended.out
    assert "Traceback" not in ended.out + ended.err
