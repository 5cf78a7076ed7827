"""The package unsloth itself, on CPUs: `enable_multi_gpu` in one of its scripts, on two ranks and on one.

It wants older versions of transformers and TRL than are installed, so `make test-rest` puts it in a folder of its own.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.env import child_environment
from tests import toy

ROOT = Path(__file__).parents[2]
UNSLOTH = Path(sys.prefix, "unsloth")
BATCH = 4

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(not UNSLOTH.is_dir(), reason="Unsloth is not there: make unsloth"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_llama(tmp_path_factory.mktemp("unsloth") / "model", initializer_range=0.2)


def run(model: Path, ranks: int, first: str, aggregation: str = "mean") -> tuple[list[dict[str, Any]], str]:
    """Return what each rank found, and all that was printed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    output = Path(tempfile.mkdtemp(dir=model.parent))
    script = [str(ROOT / "tests/e2e/unsloth_script.py"), first, str(model), str(BATCH), "1", aggregation, str(output)]
    ended = subprocess.run(
        [sys.executable, *(launcher if ranks > 1 else []), *script],
        cwd=model.parent,
        env=child_environment(
            PYTHONPATH=f"{UNSLOTH}:{ROOT / 'src'}",
            PANTHERAML_LOG="info",  # Unsloth hides lines below warning
            UNSLOTH_FORCE_CPU="1",
            UNSLOTH_DISABLE_STATISTICS="1",
            HF_HUB_OFFLINE="1",
            HF_HOME=str(model.parent / "hub"),
            OMP_NUM_THREADS="1",
        ),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-8000:]
    return [json.loads((output / f"{rank}.json").read_text()) for rank in range(ranks)], ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def one(model: Path) -> dict[str, Any]:
    (found,), _ = run(model, 1, "unsloth")
    return found


@pytest.mark.seed("S3-001", "S3-002", "S3-003", "C26")
@pytest.mark.parametrize("first", ["unsloth", "pantheraml"])
def test_two_ranks_equal_one_process(one: dict[str, Any], model: Path, first: str) -> None:
    two, printed = run(model, 2, first)
    assert one["model"].startswith("peft.")
    assert one["attention_calls"] == 2 * one["forwards"] > 0, "activations are recomputed in backward"
    assert (one["samples"], one["wrapped"]) == (BATCH, "PeftModelForCausalLM")
    assert len(set(one["loss"])) == 4, "a model that does not train would pass the checks below"
    for rank in two:
        assert (rank["samples"], rank["wrapped"], rank["reverted"]) == (BATCH // 2, "DistributedDataParallel", True)
        assert rank["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert rank["weights"] == pytest.approx(one["weights"], abs=1e-5)
        assert rank["mean_loss"] == pytest.approx(one["mean_loss"], rel=1e-5)
    assert "Multi-GPU training enabled: 2 processes, 2 samples per GPU and pass" in printed


def test_aggregation_reaches_its_trainers(one: dict[str, Any], model: Path) -> None:
    """The median of two ranks is the mean of theirs, which differs from the mean over tokens."""
    two, _ = run(model, 2, "unsloth", "median")
    assert two[0]["weights"] == two[1]["weights"]
    assert two[0]["weights"] != pytest.approx(one["weights"], abs=1e-6)
    assert two[0]["weights"] == pytest.approx(one["weights"], abs=0.1)


@pytest.mark.seed("S3-001", "S3-093")
def test_its_source_is_as_it_was_published(one: dict[str, Any]) -> None:
    assert one["reverted"]
    (record,) = UNSLOTH.glob("unsloth-*.dist-info/RECORD")
    rows = csv.reader(record.read_text().splitlines())
    sources = [row for row in rows if row[0].startswith("unsloth/") and row[0].endswith(".py")]
    assert len(sources) > 50
    for path, published, _ in sources:
        digest = hashlib.sha256((UNSLOTH / path).read_bytes()).digest()
        assert published == "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode(), path
