"""DDP, LoRA and activation checkpointing together: the error "marked ready only once" stays away, and N equals one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests import toy
from tests.distributed.launching import run_ranks


def run(folder: Path, *arguments: str, processes: int = 2) -> list[dict[str, Any]]:
    """Each rank's results."""
    run_ranks("ddp_checkpointing_ranks", processes, *arguments)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("engine")
    return run(folder, "engine", str(folder))


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """In one process, and in two."""
    model = toy.write_llama(tmp_path_factory.mktemp("trl") / "model", initializer_range=0.2)
    found = []
    for processes in (1, 2):
        folder = tmp_path_factory.mktemp(f"trl{processes}")
        found.append(run(folder, "trl", str(folder), str(model), processes=processes)[0])
    return found[0], found[1]


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
def test_in_our_wrapper(engine: list[dict[str, Any]], case: str, static_graph: bool) -> None:
    for rank in engine:
        assert rank[case]["difference"] < 1e-5
        assert rank[case]["static_graph"] is static_graph


def test_the_error_is_real(engine: list[dict[str, Any]]) -> None:
    """Looking for unused parameters forbids the static graph, and reentrant checkpointing then meets the error."""
    for rank in engine:
        assert "ready only once" in rank["error"]


@pytest.mark.parametrize(
    "case",
    ["reentrant", "not reentrant", "ours, asked for reentrant", "ours, selective", "ours, fp8", "ours, nf4"],
)
def test_under_sft_trainer(trl: tuple[dict[str, Any], dict[str, Any]], case: str) -> None:
    one, two = trl[0][case], trl[1][case]
    assert two["wrapped"] == "DistributedDataParallel"
    assert len(set(one["loss"])) == len(one["loss"]) == 4, "a model that does not train would pass what follows"
    for key in ("loss", "grad_norm"):
        # sums in another order, and what fp8 makes of the last digit
        assert two[key] == pytest.approx(one[key], rel=1e-2 if "fp8" in case else 1e-5), key


@pytest.mark.parametrize("processes", [1, 2])
def test_a_nan_of_one_process_is_met_by_all_under_sft_trainer(
    trl: tuple[dict[str, Any], dict[str, Any]], processes: int
) -> None:
    lowered, zeroed, zeros = (trl[processes - 1][name] for name in ("lower_rate", "zero", "as with zero"))
    assert lowered["verdicts"] == [[[2, "skip"]]] * processes
    assert all(map(math.isfinite, lowered["weights"]))
    assert lowered["rate_factor"] == 0.5
    assert zeroed["verdicts"] == [[[2, "zero"]]] * processes
    assert zeroed["weights"] == pytest.approx(zeros["weights"], rel=1e-6), "what the others have found enters"
    for found in (lowered, zeroed):
        assert found["alike"], "all processes end with the same weights"
