"""docs/quickstart.md, executed as it stands."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import COMMAND_SECONDS, Playground

PAGE = Path(__file__).parents[2] / "docs/quickstart.md"


@pytest.mark.extended
@pytest.mark.seed("C18")
def test_every_block_runs(playground: Playground, tmp_path: Path) -> None:
    shutil.copytree(playground.model, tmp_path / "my-model")
    blocks = re.findall(r"```(bash|python)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 6
    scripts = str(Path(sys.executable).parent)
    environment = {**playground.environment, "PATH": f"{scripts}:{playground.environment['PATH']}"}
    for language, code in blocks:
        command = ["bash", "-euo", "pipefail", "-c", code] if language == "bash" else [sys.executable, "-c", code]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
