"""pantheraml.performance on two and three ranks: the weights of one process, every sample once, nothing leaked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launching import run_ranks
from tests.distributed.performance_ranks import BATCH, CASES, EPOCHS, trained_alone

Found = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    root = tmp_path_factory.mktemp("performance")
    run_ranks("performance_ranks", request.param, root)
    return [json.loads(Path(root, f"rank-{rank}.json").read_text()) for rank in range(request.param)]


@pytest.mark.seed("S1-007", "S1-037", "S1-047", "S1-083", "S1-093", "S1-121", "S1-003")
@pytest.mark.parametrize("name", CASES)
def test_ranks_match_one_process(ranks: Found, name: str) -> None:
    alone = trained_alone(CASES[name], len(ranks))
    for found in ranks:
        assert found["cases"][name]["weights"] == pytest.approx(alone["weights"], rel=1e-5, abs=1e-6)


@pytest.mark.seed("S1-008", "S1-038")
@pytest.mark.parametrize("name", [name for name in CASES if name != "drop-last"])
def test_every_sample_is_read_once(ranks: Found, name: str) -> None:
    """In the order of a plain DataLoader; a rank without a share of the last batch repeats one of its samples."""
    alone = trained_alone(CASES[name], len(ranks))["seen"]
    steps = list(zip(*(found["cases"][name]["seen"] for found in ranks), strict=True))
    assert len(steps) == len(alone)
    for shares, batch in zip(steps, alone, strict=True):
        assert all(0 < len(share) <= BATCH for share in shares)
        read = [index for share in shares for index in share]
        assert read[: len(batch)] == batch
        assert read[len(batch) :] == [batch[0]] * max(0, len(ranks) - len(batch))


def test_drop_last_keeps_whole_batches_only(ranks: Found) -> None:
    for found in ranks:
        seen = found["cases"]["drop-last"]["seen"]
        assert {len(share) for share in seen} == {BATCH}
        assert len(seen) == EPOCHS * (23 // (BATCH * len(ranks)))


@pytest.mark.seed("S1-051", "C11")
def test_summary_says_the_global_batch(ranks: Found) -> None:
    for found in ranks:
        summary = found["cases"]["shuffled"]["summary"]
        assert (summary["batch_size"], summary["global_batch_size"]) == (BATCH, BATCH * len(ranks))
        assert summary["optimizations"]["fused_optimizer"]["value"] is True


def test_epochs_are_shuffled(ranks: Found) -> None:
    first, second = (sorted(i for found in ranks for i in found["orders"]["own"][epoch]) for epoch in range(2))
    assert first == second == list(range(12))
    assert ranks[0]["orders"]["own"][0] != ranks[0]["orders"]["own"][1]
    for found in ranks:
        three, _four, again = found["orders"]["set"]
        assert three == again
    assert any(found["orders"]["set"][0] != found["orders"]["set"][1] for found in ranks)


def test_batches_of_a_custom_batch_sampler_are_kept(ranks: Found) -> None:
    expected = {
        2: [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9]]],
        3: [[[0, 1, 2], [9]], [[3, 4, 5], [9]], [[6, 7, 8], [9]]],
    }
    for name in ("bucketed", "batched"):
        assert [found["orders"][name] for found in ranks] == expected[len(ranks)], name


def test_evaluation_between_batches_leaves_their_weights(ranks: Found) -> None:
    shares = {2: [[1.0, 2.0, 1.0], [1.0, 0.0, 1.0]], 3: [[9 / 7, 1.0], [9 / 7, 1.0], [3 / 7, 1.0]]}
    for found, expected in zip(ranks, shares[len(ranks)], strict=True):
        assert found["between"] == pytest.approx(expected)


@pytest.mark.seed(
    *("S1-011", "S1-042", "S1-044", "S1-048", "S1-050", "S1-096", "S1-097", "S1-098", "S1-108", "S1-039", "S1-043"),
    *("S1-049", "S1-113", "S1-124", "S1-126", "C11"),
)
def test_status_of_ranks(ranks: Found) -> None:
    for number, found in enumerate(ranks):
        got = found["monitored"]
        status = got["status"]
        assert (status["current_mode"], status["world_size"], status["rank"]) == ("distributed", len(ranks), number)
        stats = status["training_stats"]
        assert stats["forward_passes"] == 12
        assert stats["samples_per_second"] > 0
        assert stats["communication"]["communication_ms"] > 0
        assert got["batch"] % len(ranks) == 0
        assert 1 <= got["batch"] // len(ranks) <= 8
        assert got["enabled"]
        assert got["group"]
        assert got["checkpointed"] == ["_Checkpointed"] * 3
        assert got["optimizations"]["enable_gradient_checkpointing"]["value"] is True
    assert len({found["monitored"]["batch"] for found in ranks}) == 1


def test_bad_input_on_ranks(ranks: Found) -> None:
    for found in ranks:
        assert found["refused"].startswith("LaunchError: world_size=7 is set, but the process group has")
        assert found["late"].startswith("The optimizer has no parameter of the model")
