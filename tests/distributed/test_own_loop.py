"""Custom loops on two ranks: one verdict for both, and results that match one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launching import run_ranks
from tests.distributed.own_loop_ranks import clipped

MIB = 2**20


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root = tmp_path_factory.mktemp("own-loop")
    run_ranks("own_loop_ranks", 2, root)
    return [json.loads(Path(root, f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.seed("S1-075", "S1-080")
@pytest.mark.parametrize("kind", ["global_norm", "zclip", "adagc"])
def test_own_loop_on_two_ranks_matches_one(ranks: list[dict[str, Any]], kind: str) -> None:
    first, second = (found["clipped"][kind] for found in ranks)
    assert first == second
    assert first == pytest.approx(clipped(kind, 1, 0), rel=1e-5, abs=1e-7)


@pytest.mark.seed("S1-083")
@pytest.mark.parametrize("how", ["gradient", "loss"])
def test_nan_on_one_rank_skips_the_step_on_both(ranks: list[dict[str, Any]], how: str) -> None:
    first, second = (found[how] for found in ranks)
    for found in (first, second):
        assert [result["action"] for result in found["results"]] == ["step", "skip", "step"]
        assert found["results"][1]["cause"] == "the loss is not finite on rank 1"
    assert first["weights"] == second["weights"]
    assert first["state"] == second["state"]
    assert [found[how]["results"][1]["operation"] is not None for found in ranks] == [False, how == "gradient"]


def test_both_ranks_stop(ranks: list[dict[str, Any]]) -> None:
    assert {found["stopped"] for found in ranks} == {"Training stopped at step 1: the loss is not finite on rank 1."}


@pytest.mark.seed("S1-076", "S1-077", "S1-078", "S1-081", "S1-113")
def test_status_and_batch_size(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        status = found["gradient"]["status"]
        assert (status["current_mode"], status["mode_reason"]) == ("distributed", "the process group has 2 ranks")
        assert status["world_size"] == 2
        assert status["training_stats"]["skipped_steps"] == 1
        assert found["gradient"]["batch"] == 16


def test_unwrapped_model_is_rejected(ranks: list[dict[str, Any]]) -> None:
    for found, action in zip(ranks, ("step", "skip"), strict=True):
        refused, alone = found["unwrapped"]
        assert refused == "The process group has 2 ranks, but nothing averages their gradients."
        assert alone == action, "by itself"


@pytest.mark.seed("S1-021", "S1-022", "S1-023", "S1-024", "S1-071", "S1-072")
def test_settings_reach_ddp(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["ddp"] == [[True, False, 25 * MIB], [False, False, 3 * MIB], [False, True, 25 * MIB], []]
    assert ranks[1]["config"] == [[True, True], [False, True], [True, False]]
