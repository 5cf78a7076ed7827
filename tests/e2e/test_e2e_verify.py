"""`pantheraml verify` on this machine: it shows equality, and it fails where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pantheraml.base.env import child_environment
from pantheraml.base.errors import ConfigError, EqualityError, UnsupportedModelError
from tests import toy

UNWEIGHTED = """
import sys
if "verify" in sys.orig_argv and "pantheraml.worker" in sys.orig_argv:
    import dataclasses
    from pantheraml.engine import step
    spread = step.parallelize
    # the mean over ranks of each rank's sum, as if all had the same number of tokens: what many trainers do
    step.parallelize = lambda *given: dataclasses.replace(spread(*given), mean_over=1.0)
"""


def verify(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pantheraml", "verify", "--device", "cpu", *arguments],
        env=child_environment(**environment),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.timeout(300)
def test_modes_equal_one_process() -> None:
    done = verify("--nproc", "2", "--modes", "ddp,fsdp,tp,pp,cp", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [mode["mode"] for mode in found["modes"]] == ["ddp", "fsdp", "tp", "pp", "cp"]
    for mode in found["modes"]:
        assert mode["passed"] is True
        assert 0 < mode["gradient"] <= 1e-5, "no two ways of summing agree to the last bit"


@pytest.mark.timeout(300)
def test_a_wrong_weighting_is_caught(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(UNWEIGHTED)
    done = verify("--nproc", "2", "--modes", "ddp", PYTHONPATH=str(tmp_path))
    assert done.returncode == EqualityError.exit_code
    assert "DIFFERS" in done.stdout
    assert "ddp: the result differs from one process's" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.timeout(300)
def test_the_user_s_own_run_is_compared(tmp_path: Path) -> None:
    toy.write_gpt2(tmp_path / "model")
    toy.write_jsonl(tmp_path / "data.jsonl", toy.arithmetic(60))
    (tmp_path / "run.yaml").write_text(
        f"model: {{path: {tmp_path / 'model'}}}\n"
        f"data: {{path: {tmp_path / 'data.jsonl'}, seq_len: 48, cache_dir: {tmp_path / 'cache'}}}\n"
        "method: {kind: lora, rank: 4}\n"
        "train: {global_batch_size: 7, max_steps: 50}\n"
    )
    done = verify("--nproc", "2", "--config", str(tmp_path / "run.yaml"), "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert "not possible" in done.stdout, "GPT-2 has no tensor plan"
    assert done.stdout.count("equal") >= 3
    refused = verify("--nproc", "2", "--config", str(tmp_path / "run.yaml"), "--modes", "tp")
    assert refused.returncode == UnsupportedModelError.exit_code
    assert "Traceback" not in refused.stderr


def test_a_mode_that_does_not_exist_is_refused() -> None:
    done = verify("--nproc", "2", "--modes", "ddp,warp")
    assert done.returncode == ConfigError.exit_code
    assert "Choose from ddp, fsdp, tp, pp, cp" in done.stderr
