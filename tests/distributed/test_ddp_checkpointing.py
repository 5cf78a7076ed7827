"""DDP, LoRA and activation checkpointing combined: no "marked ready only once" error, and N ranks match one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests import toy
from tests.distributed.launching import run_ranks

pytestmark = pytest.mark.extended


def run(folder: Path, *arguments: str, processes: int = 2) -> list[dict[str, Any]]:
    """Results of each rank."""
    run_ranks("ddp_checkpointing_ranks", processes, *arguments)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("engine")
    return run(folder, "engine", str(folder))


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Results with one process and with two."""
    model = toy.write_llama(tmp_path_factory.mktemp("trl") / "model", initializer_range=0.2)
    found = []
    for processes in (1, 2):
        folder = tmp_path_factory.mktemp(f"trl{processes}")
        found.append(run(folder, "trl", str(folder), str(model), processes=processes)[0])
    return found[0], found[1]


@pytest.mark.seed("S0-100", "S1-092", "S2-065", "S2-069")
@pytest.mark.parametrize(
    ("case", "static_graph"),
    [
        ("reentrant", True),
        ("reentrant accumulated", False),
        ("reentrant median", False),
        ("not reentrant", False),
        ("not reentrant accumulated", False),
        ("full", False),
        ("selective", False),
        ("offload", False),
    ],
)
def test_ddp_checkpointing_in_the_engine(engine: list[dict[str, Any]], case: str, static_graph: bool) -> None:
    for rank in engine:
        assert rank[case]["difference"] < 1e-5
        assert rank[case]["static_graph"] is static_graph


@pytest.mark.seed("S2:236")
def test_reentrant_checkpointing_with_unused_parameters_still_fails(engine: list[dict[str, Any]]) -> None:
    """find_unused_parameters rules out the static graph, and reentrant checkpointing then raises the error."""
    for rank in engine:
        assert "ready only once" in rank["error"]


@pytest.mark.seed("S2:236", "S2-021", "S2-024", "S2-040", "S2-065", "S2-066")
@pytest.mark.parametrize(
    "case",
    ["reentrant", "not reentrant", "ours, asked for reentrant", "ours, selective", "ours, fp8", "ours, nf4"],
)
def test_ddp_checkpointing_under_sft_trainer(trl: tuple[dict[str, Any], dict[str, Any]], case: str) -> None:
    one, two = trl[0][case], trl[1][case]
    assert two["wrapped"] == "DistributedDataParallel"
    assert len(set(one["loss"])) == len(one["loss"]) == 4, "a model that does not train would pass the checks below"
    for key in ("loss", "grad_norm"):
        # another summation order, amplified by fp8 rounding
        assert two[key] == pytest.approx(one[key], rel=1e-2 if "fp8" in case else 1e-5), key


@pytest.mark.parametrize("processes", [1, 2])
def test_nan_on_one_rank_is_handled_by_all_under_sft_trainer(
    trl: tuple[dict[str, Any], dict[str, Any]], processes: int
) -> None:
    lowered, zeroed, zeros = (trl[processes - 1][name] for name in ("lower_rate", "zero", "as with zero"))
    assert lowered["verdicts"] == [[[2, "skip"]]] * processes
    assert all(map(math.isfinite, lowered["weights"]))
    assert lowered["rate_factor"] == 0.5
    assert zeroed["verdicts"] == [[[2, "zero"]]] * processes
    assert zeroed["weights"] == pytest.approx(zeros["weights"], rel=1e-6), "the gradients of the other ranks count"
    for found in (lowered, zeroed):
        assert found["alike"], "all processes end with the same weights"
