"""tests/test_ddp_fix.py runs as the product document says: by itself, and under torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import COMMAND_SECONDS, Playground

SCRIPT = Path(__file__).parents[1] / "test_ddp_fix.py"


@pytest.mark.extended
@pytest.mark.seed("S2:265", "S2-072", "S2-073", "S2-074")
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_script_runs(playground: Playground, ranks: int) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if ranks == 2 else []
    ended = subprocess.run(
        [sys.executable, *torchrun, str(SCRIPT)],
        cwd=playground.root,
        env={**playground.environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    kind = "DistributedDataParallel" if ranks == 2 else "PeftModel"
    for rank in range(ranks):
        assert f"rank {rank} of {ranks}: 3 steps with {kind} and reentrant checkpointing" in ended.stdout
