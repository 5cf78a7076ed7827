"""The communication of a step matches theory in every mode: no tensor more, and each as often as needed.

Counting and theory are those of the communication benchmark (`benchmarks/ranks`), which publishes the same numbers for
a larger model.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launching import LIMIT_SECONDS

pytestmark = pytest.mark.extended

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

HIDDEN, LAYERS, VOCABULARY, LENGTH, ROWS = 64, 4, 512, 32, 4
SIZE = {"hidden": HIDDEN, "layers": LAYERS, "vocabulary": VOCABULARY, "seq_len": LENGTH, "batch": ROWS}
ACTIVATIONS = 4 * ROWS * LENGTH * HIDDEN
NUMBERS = 1024
"""Bytes allowed for the all-gather of a step's scalars."""


@dataclass(frozen=True)
class Case:
    mode: str
    method: str
    passes: int = 1
    stages: int = 1

    def __str__(self) -> str:
        return f"{self.mode} {self.method} {self.passes}x{self.stages}"


CASES = [
    *(Case(mode, method) for mode in ("ddp", "fsdp", "tp", "cp") for method in ("lora", "full")),
    Case("ddp", "lora", passes=4),
    Case("fsdp", "full", passes=2),
    Case("tp", "lora", passes=2),
    Case("cp", "full", passes=2),
    Case("pp", "lora", passes=4),
    Case("pp", "full", passes=2),
    Case("pp", "full", passes=2, stages=2),
]

RUN = """
import json, sys
sys.path.insert(0, sys.argv[1])
from ranks.launch import run_ranks
from ranks.theory import Case, Shape, expected
request = json.loads(sys.argv[2])
size = request["size"]
shape = Shape(size["hidden"], size["layers"], size["vocabulary"], tokens=size["batch"] * size["seq_len"])
theory = [expected(Case(**case), shape) for case in request["cases"]]
print(json.dumps([
    {"ranks": ranks, "counts": wanted.counts, "whole_bytes": wanted.whole_bytes}
    for ranks, wanted in zip(run_ranks("communication", request), theory, strict=True)
]))
"""


@pytest.fixture(scope="module")
def results() -> dict[Case, dict[str, Any]]:
    request = json.dumps({"size": SIZE, "cases": [asdict(case) for case in CASES]})
    command = [sys.executable, "-c", RUN, str(BENCHMARKS), request]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr[-6000:]
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.seed("S0-073", "S1-091")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_communication_matches_theory(results: dict[Case, dict[str, Any]], case: Case) -> None:
    found = results[case]
    for rank in found["ranks"]:
        assert rank["counts"] == found["counts"]
        assert rank["whole_bytes"] == found["whole_bytes"]
        assert rank["numbers"]["kind"] == "all-gather"
        assert rank["numbers"]["whole_bytes"] <= NUMBERS


@pytest.mark.seed("S0-073")
@pytest.mark.parametrize("passes", [1, 4])
def test_lora_under_ddp_sends_only_adapter_gradients(results: dict[Case, dict[str, Any]], passes: int) -> None:
    for rank in results[Case("ddp", "lora", passes)]["ranks"]:
        assert rank["counts"] == {"all-reduce": 1}
        assert rank["whole_bytes"] == {"all-reduce": rank["trained_bytes"]}
        # with two ranks, an all-reduce sends as many bytes as the tensor has
        assert rank["sent_bytes"] == rank["trained_bytes"]


def test_fsdp_gathers_a_layer_twice_and_scatters_its_gradient_once(results: dict[Case, dict[str, Any]]) -> None:
    counts = results[Case("fsdp", "full")]["ranks"][0]["counts"]
    assert counts == {"all-gather": 2 * LAYERS + 1, "reduce-scatter": LAYERS + 1}


def test_tensor_parallel_all_reduces_activations_twice_each_in_forward_and_backward(
    results: dict[Case, dict[str, Any]],
) -> None:
    """Plus once each for the embedding and the head."""
    rank = results[Case("tp", "full")]["ranks"][0]
    assert rank["counts"]["all-reduce"] == 4 * LAYERS + 2
    assert rank["whole_bytes"]["all-reduce"] == (4 * LAYERS + 2) * ACTIVATIONS


def test_pipeline_sends_every_hidden_state_and_gradient_once(results: dict[Case, dict[str, Any]]) -> None:
    for rank in results[Case("pp", "lora", passes=4)]["ranks"]:
        assert rank["counts"] == {"send": 4}
        assert rank["whole_bytes"]["send"] == ACTIVATIONS
