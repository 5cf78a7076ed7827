"""Gradients of three ranks become one in every way that is offered, and ranks that drift apart are found out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.distributed.launching import run_ranks

TOLERANCE = 1e-5
WORLD = 3

pytestmark = pytest.mark.timeout(500)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Per rank: case -> what it found."""
    folder = tmp_path_factory.mktemp("aggregation")
    run_ranks("aggregation_ranks", WORLD, folder)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("layout", ["view", "copy"])
@pytest.mark.parametrize("method", ["mean", "weighted", "weighted_mean", "median", "trimmed_mean"])
def test_every_method_is_what_one_process_computes(ranks: list[dict[str, Any]], method: str, layout: str) -> None:
    for rank in ranks:
        assert rank["methods"][f"{method} {layout}"] < TOLERANCE


def test_median_of_adapters(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["lora"]["difference"] < TOLERANCE
        assert rank["lora"]["left_out"] == []


@pytest.mark.parametrize("method", ["mean", "median", "trimmed_mean"])
def test_a_rank_without_tokens_has_no_say(ranks: list[dict[str, Any]], method: str) -> None:
    for rank in ranks:
        assert rank["rank_without_tokens"][method]["difference"] < TOLERANCE
        assert rank["rank_without_tokens"][method]["left_out"] == []


@pytest.mark.parametrize("method", ["mean", "weighted", "median"])
def test_a_nonfinite_rank_is_left_out_of_the_whole_step(ranks: list[dict[str, Any]], method: str) -> None:
    for rank in ranks:
        assert rank["leave_out"][method]["left_out"] == [1]
        assert rank["leave_out"][method]["difference"] < TOLERANCE


def test_nobody_is_left_out_without_cause(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["leave_out"]["nobody"]["left_out"] == []
        assert rank["leave_out"]["nobody"]["difference"] < TOLERANCE


@pytest.mark.parametrize("case", ["not configured", "all ranks"])
@pytest.mark.parametrize("method", ["mean", "median", "trimmed_mean"])
def test_a_nan_that_is_not_left_out_stays_to_be_seen(ranks: list[dict[str, Any]], method: str, case: str) -> None:
    for rank in ranks:
        found = rank["nonfinite_shows"][f"{method}, {case}"]
        assert found == {"nans": {"model.model.layers.0.self_attn.q_proj.weight": 1}, "left_out": []}


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_mean_sends_trainable_gradients_once_and_nothing_else(ranks: list[dict[str, Any]], kind: str) -> None:
    for rank in ranks:
        found = rank["traffic"][f"mean {kind}"]
        assert {name for name, _ in found["calls"]} == {"allreduce_"}
        assert sum(size for _, size in found["calls"]) == found["gradient_bytes"]
    assert len(ranks[0]["traffic"]["mean lora"]["calls"]) == 1
    assert len(ranks[0]["traffic"]["mean full"]["calls"]) > 4


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_weights_cost_one_small_gather(ranks: list[dict[str, Any]], kind: str) -> None:
    for rank in ranks:
        mean, weighted = rank["traffic"][f"mean {kind}"]["calls"], rank["traffic"][f"weighted {kind}"]["calls"]
        assert weighted == [*mean, ["allgather_", 8]]


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_median_moves_the_bytes_of_an_all_reduce(ranks: list[dict[str, Any]], kind: str) -> None:
    """Of what it is given, an all-to-all sends (n-1)/n, and an all-gather n-1 times as much: in all 2 (n-1)/n."""
    for rank in ranks:
        mean, median = rank["traffic"][f"mean {kind}"]["calls"], rank["traffic"][f"median {kind}"]["calls"]
        count = len(mean)
        assert [name for name, _ in median] == ["alltoall_base_"] * count + ["allgather_"] * (1 + count)
        padding = 4 * (WORLD - 1)
        exchanged, (_, small), gathered = median[:count], median[count], median[count + 1 :]
        assert small == 16
        for (_, whole), (_, sent), (_, part) in zip(mean, exchanged, gathered, strict=True):
            assert whole <= sent <= whole + padding
            assert part == sent // WORLD


def test_a_slow_rank_gets_less_and_nothing_else_changes(ranks: list[dict[str, Any]]) -> None:
    shares = ranks[0]["adaptive"]["shares"]
    assert all(rank["adaptive"]["shares"] == shares for rank in ranks)
    assert shares[:3] == [[4, 4, 4]] * 3  # measured over steps 0 and 1, known for step 3
    assert 1 <= shares[-1][0] <= 2
    assert all(sum(each) == 12 for each in shares)
    for rank in ranks:
        assert max(rank["adaptive"]["losses"]) < TOLERANCE
        assert max(rank["adaptive"]["gradients"]) < TOLERANCE
        assert rank["adaptive"]["weights"] < TOLERANCE


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("same", [None, None, None]),
        ("last bit", ["Rank 2 ", "the weight model.model.layers.1.mlp.up_proj.weight."]),
        ("swapped", ["Rank 1 ", "the gradient of model.model.norm.weight."]),
        ("missing", ["Rank 0 ", "the gradient of model.model.norm.weight."]),
        ("every rank", ["Ranks 0, 1, 2 ", "no majority", "the weight model.model.norm.weight."]),
        ("other parameters", ["Rank 1 ", "the list of parameters."]),
        ("outside the group", [None, None, None]),
        ("inside the group", ["Ranks 0, 1 ", "the gradient of model.model.norm.weight."]),
    ],
)
def test_drift_names_rank_and_tensor(ranks: list[dict[str, Any]], case: str, expected: list[str | None]) -> None:
    texts = [rank["consistency"][case] for rank in ranks]
    if expected[0] is None:
        assert texts == expected
        return
    members = texts[:2] if "group" in case else texts
    assert len(set(members)) == 1, "all ranks raise the same"
    for part in expected:
        assert part in members[0]
