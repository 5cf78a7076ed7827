"""Scripts at the paths that the product documents name: they run, and their exit code is that of the tests."""

from __future__ import annotations

import dataclasses
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
def test_a_loop_of_ones_own_is_relaunched(playground: Playground) -> None:
    """As the example says; `enable_multi_gpu` and the trainers are relaunched in test_e2e_trainer.py."""
    here = dataclasses.replace(playground, environment={**playground.environment, "PANTHERAML_NPROC": "2"})
    ended = run(here, str(ROOT / "examples/custom_loop.py"), "--max-steps", "2")
    assert ended.returncode == 0, ended.stderr
    assert "2 steps on 2 process(es)" in ended.stdout
    assert "relaunching the script as 2 processes, on CPUs: no GPU is visible" in ended.stderr


@pytest.mark.extended
def test_a_launch_without_a_guard_says_what_is_missing(playground: Playground) -> None:
    script = playground.root / "unguarded.py"
    script.write_text("from pantheraml.multigpu import launch\n\nlaunch(print, nproc=2)\n")
    ended = run(playground, str(script))
    assert ended.returncode == 1
    guard = 'put the call under `if __name__ == "__main__":`.'
    assert f"would start processes again.\n  fix: In the script, {guard}" in ended.stderr
    assert ended.stderr.endswith(f"fix: Its error is above. In a script, {guard}\n")


@pytest.mark.extended
@pytest.mark.seed("S0:161", "S0-078", "S0-116")
def test_multi_gpu_tests_as_a_script(playground: Playground) -> None:
    chosen = run(playground, str(ROOT / "tests/test_multi_gpu.py"), "-q", "-k", "test_probe_reports_local_hardware")
    assert chosen.returncode == 0, chosen.stdout + chosen.stderr
    assert "1 passed" in chosen.stdout
    assert run(playground, str(ROOT / "tests/test_multi_gpu.py"), "--no-such-option").returncode == 4
