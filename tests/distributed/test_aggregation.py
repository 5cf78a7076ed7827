"""Every gradient aggregation on three ranks, and detection of drifting replicas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.aggregation_runs import (
    BAD_RANK,
    WEIGHTS,
    Share,
    config_of,
    median_norm,
    poisoned_sample,
    shares_of,
    weighted_norm,
    write_inputs,
)
from tests.distributed.launching import run_ranks
from tests.event_log import raw_events
from tests.harness import make_plan, make_run, train_here, values

pytestmark = pytest.mark.extended

TOLERANCE = 1e-5
WORLD = 3


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the results of all ranks."""
    folder = tmp_path_factory.mktemp("aggregation")
    write_inputs(folder)
    run_ranks("aggregation_ranks", WORLD, folder)
    return folder


@pytest.fixture(scope="module")
def ranks(root: Path) -> list[dict[str, Any]]:
    """Results by rank: case -> numbers."""
    return [json.loads((root / f"rank{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.seed("C9", "S3-038", "S3-058", "S3-059", "S3-060")
@pytest.mark.parametrize("layout", ["view", "copy"])
@pytest.mark.parametrize("method", ["mean", "weighted", "weighted_mean", "median", "trimmed_mean"])
def test_every_aggregation_matches_one_process(ranks: list[dict[str, Any]], method: str, layout: str) -> None:
    for rank in ranks:
        assert rank["methods"][f"{method} {layout}"] < TOLERANCE


def test_median_of_adapters(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["lora"]["difference"] < TOLERANCE
        assert rank["lora"]["left_out"] == []


@pytest.mark.parametrize("method", ["mean", "median", "trimmed_mean"])
def test_rank_without_tokens_has_no_weight(ranks: list[dict[str, Any]], method: str) -> None:
    for rank in ranks:
        assert rank["rank_without_tokens"][method]["difference"] < TOLERANCE
        assert rank["rank_without_tokens"][method]["left_out"] == []


@pytest.mark.seed("S3-062")
@pytest.mark.parametrize("method", ["mean", "weighted", "median"])
def test_nonfinite_rank_is_excluded_from_the_whole_step(ranks: list[dict[str, Any]], method: str) -> None:
    for rank in ranks:
        assert rank["leave_out"][method]["left_out"] == [1]
        assert rank["leave_out"][method]["difference"] < TOLERANCE


def test_finite_ranks_are_not_excluded(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["leave_out"]["nobody"]["left_out"] == []
        assert rank["leave_out"]["nobody"]["difference"] < TOLERANCE


@pytest.mark.parametrize("case", ["not configured", "all ranks"])
@pytest.mark.parametrize("method", ["mean", "median", "trimmed_mean"])
def test_nan_stays_visible_unless_excluded(ranks: list[dict[str, Any]], method: str, case: str) -> None:
    for rank in ranks:
        found = rank["nonfinite_shows"][f"{method}, {case}"]
        assert found == {"nans": {"model.model.layers.0.self_attn.q_proj.weight": 1}, "left_out": []}


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_mean_sends_only_trainable_gradients_once(ranks: list[dict[str, Any]], kind: str) -> None:
    for rank in ranks:
        found = rank["traffic"][f"mean {kind}"]
        assert {name for name, _ in found["calls"]} == {"allreduce_"}
        assert sum(size for _, size in found["calls"]) == found["gradient_bytes"]
    assert len(ranks[0]["traffic"]["mean lora"]["calls"]) == 1
    assert len(ranks[0]["traffic"]["mean full"]["calls"]) > 4


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_weighted_mean_costs_one_small_gather(ranks: list[dict[str, Any]], kind: str) -> None:
    for rank in ranks:
        mean, weighted = rank["traffic"][f"mean {kind}"]["calls"], rank["traffic"][f"weighted {kind}"]["calls"]
        assert weighted == [*mean, ["allgather_", 8]]


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_median_sends_as_many_bytes_as_an_all_reduce(ranks: list[dict[str, Any]], kind: str) -> None:
    """An all-to-all sends (n-1)/n of its input, an all-gather of 1/n the same again: 2 (n-1)/n in total."""
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


@pytest.mark.seed("S0-110", "S1-132", "S3-053", "S3-056", "S4-032")
def test_slow_rank_gets_fewer_samples_with_equal_results(ranks: list[dict[str, Any]]) -> None:
    shares = ranks[0]["adaptive"]["shares"]
    assert all(rank["adaptive"]["shares"] == shares for rank in ranks)
    assert shares[:3] == [[4, 4, 4]] * 3  # measured in steps 0 and 1, applied from step 3
    assert 1 <= shares[-1][0] <= 2
    assert all(sum(each) == 12 for each in shares)
    for rank in ranks:
        assert max(rank["adaptive"]["losses"]) < TOLERANCE
        assert max(rank["adaptive"]["gradients"]) < TOLERANCE
        assert rank["adaptive"]["weights"] < TOLERANCE


@pytest.mark.seed("S3-061")
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
def test_drift_error_names_rank_and_tensor(ranks: list[dict[str, Any]], case: str, expected: list[str | None]) -> None:
    texts = [rank["consistency"][case] for rank in ranks]
    if expected[0] is None:
        assert texts == expected
        return
    members = texts[:2] if "group" in case else texts
    assert len(set(members)) == 1, "all ranks raise the same error"
    for part in expected:
        assert part in members[0]


# Whole runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shares(root: Path) -> list[Share]:
    """Each rank's share of the first step, computed in one process."""
    return shares_of(root, "median", step=1)


def test_runs_use_the_configured_aggregation(root: Path, shares: list[Share]) -> None:
    mean = weighted_norm(shares, [1, 1, 1])
    for name, expected in (("median", median_norm(shares)), ("weighted", weighted_norm(shares, WEIGHTS))):
        norms = values(raw_events(root / name), "train.step", "grad_norm")
        assert norms[0] == pytest.approx(expected, rel=TOLERANCE)
        assert norms[0] != pytest.approx(mean, rel=100 * TOLERANCE), "the case distinguishes them"


def test_rank_with_a_transient_fault_is_not_excluded(root: Path, shares: list[Share]) -> None:
    events = raw_events(root / "a fault that passes")
    (verdict,) = [event for event in events if event["kind"] == "verdict"]
    assert (verdict["step"], verdict["action"], verdict["anomaly"]) == (1, "retry", "left_out")
    assert (verdict["transient"], verdict["ranks"]) == (True, [BAD_RANK])
    assert values(events, "aggregation.left_out", "step") == [], "the retried step includes all ranks"
    assert values(events, "incident", "transient") == [True]
    norms = values(events, "train.step", "grad_norm")
    assert norms[0] == pytest.approx(weighted_norm(shares, [1, 1, 1]), rel=TOLERANCE)


def test_rank_with_a_persistent_fault_is_excluded_and_explained(root: Path, shares: list[Share]) -> None:
    run, bad = root / "a fault that stays", poisoned_sample(root)
    (holder,) = [rank for rank, share in enumerate(shares) if bad in share.samples]
    events = raw_events(run)
    (verdict,) = [event for event in events if event["kind"] == "verdict"]
    assert (verdict["step"], verdict["action"], verdict["anomaly"]) == (1, "step", "left_out")
    assert (verdict["transient"], verdict["ranks"]) == (False, [holder])
    (left_out,) = [event for event in events if event["kind"] == "aggregation.left_out"]
    assert (left_out["step"], left_out["ranks"]) == (1, [holder])
    (incident,) = [event for event in events if event["kind"] == "incident"]
    assert (incident["rank"], incident["samples"], incident["transient"]) == (holder, [bad], False)
    assert incident["module"].endswith("embed_tokens")
    written = json.loads((run / incident["path"]).read_text())
    assert written["rank_samples"] == [share.samples for share in shares]
    sound = [share for rank, share in enumerate(shares) if rank != holder]
    norms, losses = (values(events, "train.step", field) for field in ("grad_norm", "loss"))
    assert norms[0] == pytest.approx(weighted_norm(sound, [1, 1]), rel=TOLERANCE)
    tokens = sum(share.tokens for share in sound)
    assert losses[0] == pytest.approx(sum(share.loss * share.tokens for share in sound) / tokens, rel=TOLERANCE)
    adapter = load_file(run / "adapter" / "adapter_model.safetensors")
    assert all(bool(torch.isfinite(weight).all()) for weight in adapter.values())


def test_spike_names_the_rank_with_the_largest_loss(root: Path) -> None:
    incident = next(event for event in raw_events(root / "spike") if event["kind"] == "incident")
    written = json.loads((root / "spike" / incident["path"]).read_text())
    assert written["verdict"]["anomaly"] == "spike"
    expected = shares_of(root, "spike", incident["step"])
    assert written["rank_losses"] == pytest.approx([share.loss for share in expected], rel=TOLERANCE)
    worst = max(range(WORLD), key=lambda rank: expected[rank].loss)
    assert (incident["rank"], incident["samples"]) == (worst, expected[worst].samples)
    assert f"; the loss is {expected[worst].loss:.4g} on rank {worst}: data.jsonl line " in incident["finding"]
    assert [origin["sample"] for origin in written["origins"]] == expected[worst].samples


def test_drifting_run_stops_and_names_the_rank(root: Path, ranks: list[dict[str, Any]]) -> None:
    (what,) = {rank["runs"]["drift"] for rank in ranks}
    assert what.startswith(f"Rank {BAD_RANK} diverged from the other 2 rank(s)")
    assert "at step 3 is in the weight " in what
    assert values(raw_events(root / "drift"), "train.step", "step") == [1, 2], "no step was applied after it"
    for rank in ranks:
        assert [name for name, end in rank["runs"].items() if end is not None] == ["drift"]


def test_slow_rank_gets_less_work_with_the_same_result(root: Path) -> None:
    events = raw_events(root / "slow")
    tokens = values(events, "train.ranks", "tokens")
    bad = [float(by_rank[BAD_RANK]) / sum(by_rank) for by_rank in tokens]
    even, measured = sum(bad[:10]) / 10, sum(bad[12:]) / 2
    assert even == pytest.approx(1 / 3, abs=0.05)
    assert measured < 0.6 * even
    config = config_of(root, train={"max_steps": 14})
    alone = train_here(make_run(root / "alone", config, make_plan(config, micro=2)))
    assert values(events, "train.step", "loss") == pytest.approx(values(alone, "train.step", "loss"), rel=TOLERANCE)
