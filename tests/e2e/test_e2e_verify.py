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
from tests.e2e.conftest import COMMAND_SECONDS

pytestmark = pytest.mark.extended

MEAN_OF_MEANS = """
import sys
if "verify" in sys.orig_argv and "pantheraml.worker" in sys.orig_argv:
    import dataclasses
    from pantheraml.engine.step import step
    passes = step.Stepper._passes
    def mean_of_means(self, batches):
        # each rank's mean over its own tokens, and the mean of those, as if all had the same number: a common mistake
        ranks, own = self._parallelized.mean_over, step._targets(batches)
        return passes(self, dataclasses.replace(batches, target_tokens=ranks * own))
    step.Stepper._passes = mean_of_means
"""


def verify(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pantheraml", "verify", "--device", "cpu", *arguments],
        env=child_environment(**environment),
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )


@pytest.mark.seed("S2:214")
def test_modes_equal_one_process() -> None:
    done = verify("--nproc", "2", "--modes", "ddp,fsdp,tp,pp,cp", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [mode["mode"] for mode in found["modes"]] == ["ddp", "fsdp", "tp", "pp", "cp"]
    assert found["notes"] == []
    for mode in found["modes"]:
        assert mode["passed"] is True
        assert 0 < mode["gradient"] <= 1e-5, "no two ways of summing agree to the last bit"


def test_a_wrong_weighting_is_caught(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(MEAN_OF_MEANS)
    done = verify("--nproc", "2", "--modes", "ddp", "--json", PYTHONPATH=str(tmp_path))
    assert done.returncode == EqualityError.exit_code
    assert "ddp: the result differs from one process's" in done.stderr
    assert "Traceback" not in done.stderr
    found = json.loads(done.stdout)
    (mode,) = found["modes"]
    assert mode["passed"] is False
    assert found["tolerance"] == 1e-5
    assert 1e-3 < mode["gradient"] < 1, "not scaled, only weighted wrongly"


def test_the_user_s_own_run_is_compared(tmp_path: Path) -> None:
    """Also one with what cannot be equal, such as dropout, which is left out and said."""
    toy.write_gpt2(tmp_path / "model")
    settings = tmp_path / "model/config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "resid_pdrop": 0.2, "embd_pdrop": 0.2}))
    toy.write_jsonl(tmp_path / "data.jsonl", toy.arithmetic(60))
    (tmp_path / "run.yaml").write_text(
        f"model: {{path: {tmp_path / 'model'}}}\n"
        f"data: {{path: {tmp_path / 'data.jsonl'}, seq_len: 48, cache_dir: {tmp_path / 'cache'}}}\n"
        "method: {kind: lora, rank: 4, dropout: 0.1}\n"
        "train: {global_batch_size: 7, max_steps: 50}\n"
        "parallel: {aggregation: median, batch_shares: [2, 5]}\n"
    )
    done = verify("--nproc", "2", "--config", str(tmp_path / "run.yaml"), "--steps", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    passed = {mode["mode"]: mode["passed"] for mode in found["modes"]}
    assert passed == {"ddp": True, "fsdp": True, "tp": None, "pp": True, "cp": True}, "GPT-2 has no tensor plan"
    shares = {mode["mode"]: mode["batch_shares"] for mode in found["modes"]}
    assert shares == {"ddp": [2, 5], "fsdp": [2, 5], "tp": None, "pp": None, "cp": None}
    dropout, aggregation = found["notes"]
    assert (
        dropout == "compared without dropout (embd_pdrop, method.dropout, resid_pdrop): each rank has its own RNG state"
    )
    assert aggregation.startswith("compared with parallel.aggregation=mean")
    refused = verify("--nproc", "2", "--config", str(tmp_path / "run.yaml"), "--modes", "tp")
    assert refused.returncode == UnsupportedModelError.exit_code
    assert "Traceback" not in refused.stderr


def test_a_mode_that_does_not_exist_is_refused() -> None:
    done = verify("--nproc", "2", "--modes", "ddp,warp")
    assert done.returncode == ConfigError.exit_code
    assert "Choose from ddp, fsdp, tp, pp, cp" in done.stderr


def test_no_steps_at_all_are_refused() -> None:
    done = verify("--modes", "ddp", "--steps", "0")
    assert done.returncode == ConfigError.exit_code, done.stderr
    assert "--steps 0 compares nothing" in done.stderr
