"""`pantheraml doctor`: with real processes and a real run, and with a torch that cannot be imported."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pantheraml.base.errors import InstallationError
from tests.e2e.conftest import Playground, result_of

EXAMPLE = Path(__file__).parents[2] / "examples/verify_installation.py"


@pytest.mark.extended
@pytest.mark.seed("S0-117", "S3-010", "S3-050", "S3-092")
def test_verify_installation(playground: Playground, tmp_path: Path) -> None:
    """The example, which ends with the doctor."""
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLE)],
        cwd=playground.root,
        env={**playground.environment, "TMPDIR": str(tmp_path), "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    playground.started.append(process)
    ended = result_of(process)
    assert ended.code == 0, ended
    assert "All names can be imported: FastLanguageModel" in ended.out
    assert re.search(r"ok +collective +\d+ processes over (gloo|nccl): 16 MiB all-reduced in", ended.out)
    assert re.search(r"ok +training +2 steps in (fp32|bf16|fp16) by \d+ process", ended.out)
    assert "This host can train" in ended.out
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
