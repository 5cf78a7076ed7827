"""Scripts at the paths that the product documents name: they run, and their exit code is that of the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import COMMAND_SECONDS, Playground

ROOT = Path(__file__).parents[2]


def run(playground: Playground, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=playground.root,
        env={**playground.environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )


@pytest.mark.extended
@pytest.mark.seed("S2:265", "S2-072", "S2-073", "S2-074")
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_ddp_fix(playground: Playground, ranks: int) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if ranks == 2 else []
    ended = run(playground, *torchrun, str(ROOT / "tests/test_ddp_fix.py"))
    assert ended.returncode == 0, ended.stderr
    kind = "DistributedDataParallel" if ranks == 2 else "PeftModel"
    for rank in range(ranks):
        assert f"rank {rank} of {ranks}: 3 steps with {kind} and reentrant checkpointing" in ended.stdout


@pytest.mark.extended
@pytest.mark.seed("S0:161", "S0-078", "S0-116")
def test_multi_gpu_tests_as_a_script(playground: Playground) -> None:
    chosen = run(
        playground, str(ROOT / "tests/test_multi_gpu.py"), "-q", "-k", "test_probe_reports or test_auto_policy"
    )
    assert chosen.returncode == 0, chosen.stdout + chosen.stderr
    assert "6 passed" in chosen.stdout
    assert run(playground, str(ROOT / "tests/test_multi_gpu.py"), "--no-such-option").returncode == 4


@pytest.mark.extended
@pytest.mark.seed("S3:187", "S3-075")
def test_quick_tests_as_a_script(playground: Playground) -> None:
    script = str(ROOT / "tests/run_all_tests.py")
    ended = run(playground, script, "--quick", "-q", "-p", "no:xdist", "-k", "test_probe_reports")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 passed" in ended.stdout


@pytest.mark.extended
@pytest.mark.seed("S3:181", "S3-051", "S3-074")
def test_all_tests_as_a_script(playground: Playground) -> None:
    """Two tests of them all: of the folders of `testpaths`, and of the interpreter's, in a process of its own."""
    chosen = "test_probe_reports_local_hardware or test_truncated_projection_is_detected"
    ended = run(playground, str(ROOT / "tests/run_all_tests.py"), "-q", "-p", "no:xdist", "-k", chosen)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("1 passed") == 2
