from __future__ import annotations

import json

import numpy as np
import pytest

from pantheraml.parallel.shard_batch import AdaptiveShares, even_shares, shards, weighted_shares


@pytest.mark.parametrize(
    ("samples", "size", "micro"), [(8, 1, 8), (7, 2, 2), (3, 4, 1), (10, 3, 4), (16, 4, 4), (0, 2, 1)]
)
@pytest.mark.parametrize("uneven", [False, True])
def test_shards_cover_the_batch_once_in_order(samples: int, size: int, micro: int, uneven: bool) -> None:
    ids = np.arange(100, 100 + samples)
    weights = [rank * 0.7 for rank in range(1, size + 1)] if uneven else None
    parts = shards(ids, size, micro_batch=micro, weights=weights)
    assert len(parts) == size
    assert [int(index) for rank in parts for part in rank for index in part] == ids.tolist()
    assert all(1 <= len(part) <= micro for rank in parts for part in rank)


def test_even_shares_differ_by_one_at_most() -> None:
    assert even_shares(7, 3) == [3, 2, 2]
    assert even_shares(2, 3) == [1, 1, 0]
    for count in range(40):
        assert even_shares(count, 6) == [len(part) for part in np.array_split(np.arange(count), 6)]


@pytest.mark.seed("S3-037", "S3-055", "S0-110")
def test_sizes_by_hand_are_the_shares_of_a_full_batch() -> None:
    assert weighted_shares(21, [2, 2, 2, 15]) == [2, 2, 2, 15]
    assert weighted_shares(42, [2, 2, 2, 15]) == [4, 4, 4, 30]
    assert weighted_shares(4, [2, 2, 2, 15]) == [1, 0, 0, 3]  # a short last batch
    assert weighted_shares(5, [0, 1]) == [0, 5]


def test_no_rounding_error_moves_a_sample() -> None:
    """0.1 and 0.3 are not exact in binary, but their shares of many samples are still within one of the quota."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        weights = rng.random(5)
        count = int(rng.integers(0, 1000))
        shares = weighted_shares(count, weights.tolist())
        assert sum(shares) == count
        assert np.abs(np.array(shares) - count * weights / weights.sum()).max() < 1


def observe(adaptive: AdaptiveShares, steps: range, speeds: list[float]) -> None:
    """Ranks that work at `speeds` tokens per second on shares that the weights give them."""
    for step in steps:
        tokens = [1000 * weight for weight in adaptive.weights_at(step)]
        adaptive.observe(step, tokens, [count / speed for count, speed in zip(tokens, speeds, strict=True)])


@pytest.mark.seed("S3-056")
def test_adaptive_weights_become_the_speeds() -> None:
    adaptive = AdaptiveShares(3, global_batch=64, window=2)
    observe(adaptive, range(4), [100.0, 100.0, 50.0])
    assert adaptive.weights_at(10) == pytest.approx([0.4, 0.4, 0.2])


def test_new_weights_apply_from_the_step_after_next() -> None:
    """The batches of step k + 1 are read while k runs, and may ask before or after k was observed."""
    adaptive = AdaptiveShares(2, global_batch=64, window=1)
    for step in range(6):
        before = adaptive.weights_at(step + 1)
        adaptive.observe(step, [1.0, 1.0], [1.0, 1.0 + step])
        assert adaptive.weights_at(step + 1) == before
        assert (adaptive.weights_at(step + 2) == before) == (step == 0)


def test_weights_change_at_the_ends_of_windows_alone_and_are_smoothed() -> None:
    adaptive = AdaptiveShares(2, global_batch=64, window=3)
    observe(adaptive, range(2), [1.0, 3.0])
    assert adaptive.weights_at(10) == (0.5, 0.5)
    observe(adaptive, range(2, 3), [1.0, 3.0])
    assert adaptive.weights_at(10) == pytest.approx([0.25, 0.75])
    observe(adaptive, range(3, 6), [1.0, 1.0])
    assert adaptive.weights_at(10) == pytest.approx([1 / 3, 2 / 3])  # speeds 1 and (3 + 1) / 2


def test_window_is_weighted_by_time() -> None:
    """A long step counts for more than a short one."""
    adaptive = AdaptiveShares(2, global_batch=64, window=2)
    adaptive.observe(0, [300.0, 100.0], [1.0, 1.0])
    adaptive.observe(1, [100.0, 100.0], [3.0, 1.0])
    assert adaptive.weights_at(5) == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize(("global_batch", "floor"), [(64, 0.0625), (8, 0.125), (4, 0.25), (2, 0.25)])
def test_no_rank_falls_below_the_floor(global_batch: int, floor: float) -> None:
    """A quarter of an even share, and a whole sample where there are enough."""
    adaptive = AdaptiveShares(4, global_batch=global_batch, window=1)
    observe(adaptive, range(3), [100.0, 50.0, 1e-3, 1e-6])
    weights = adaptive.weights_at(9)
    assert sum(weights) == pytest.approx(1)
    assert min(weights) == pytest.approx(floor)
    assert weights[2] == weights[3]
    if floor < 0.25:
        assert weights[0] == pytest.approx(2 * weights[1])
    if global_batch >= 4:
        assert min(weighted_shares(global_batch, weights)) >= 1


def test_rank_without_samples_keeps_its_speed() -> None:
    adaptive = AdaptiveShares(2, global_batch=64, window=1)
    adaptive.observe(0, [30.0, 10.0], [1.0, 1.0])
    adaptive.observe(1, [30.0, 0.0], [1.0, 0.5])
    assert adaptive.weights_at(9) == pytest.approx([0.75, 0.25])


def test_a_rank_that_was_never_measured_keeps_shares_even() -> None:
    adaptive = AdaptiveShares(2, global_batch=64, window=1)
    adaptive.observe(0, [30.0, 0.0], [1.0, 0.0])
    assert adaptive.weights_at(9) == (0.5, 0.5)


def test_state_round_trip_continues_identically() -> None:
    whole = AdaptiveShares(2, global_batch=64, window=2)
    observe(whole, range(4), [1.0, 2.0])
    observe(whole, range(4, 5), [5.0, 2.0])
    resumed = AdaptiveShares(2, global_batch=64, window=2)
    resumed.from_state(json.loads(json.dumps(whole.to_state())))
    for each in (whole, resumed):
        observe(each, range(5, 6), [5.0, 2.0])
    assert [resumed.weights_at(step) for step in (5, 6, 7)] == [whole.weights_at(step) for step in (5, 6, 7)]
    assert whole.weights_at(6) != whole.weights_at(7)
    assert resumed.to_state() == whole.to_state()


def test_state_of_another_world_size_is_ignored() -> None:
    adaptive = AdaptiveShares(2, global_batch=64, window=1)
    observe(adaptive, range(2), [1.0, 2.0])
    other = AdaptiveShares(3, global_batch=64, window=1)
    other.from_state(adaptive.to_state())
    assert other.weights_at(9) == pytest.approx([1 / 3] * 3)
