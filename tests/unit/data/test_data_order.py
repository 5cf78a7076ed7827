from __future__ import annotations

import numpy as np
import pytest

from pantheraml.data.order import step_samples


def stream(steps: int, **changes: object) -> list[int]:
    arguments = {"fingerprint": "abc", "seed": 7, "size": 10, "global_batch": 4, **changes}
    return [sample for step in range(steps) for sample in step_samples(step=step, **arguments).tolist()]  # type: ignore[arg-type]


def test_every_epoch_visits_every_sample_once() -> None:
    samples = stream(15)  # 60 samples: six epochs, with batches that cross epoch boundaries
    for epoch in range(6):
        assert sorted(samples[epoch * 10 : epoch * 10 + 10]) == list(range(10))


def test_epochs_differ_from_one_another() -> None:
    samples = stream(15)
    assert len({tuple(samples[at : at + 10]) for at in range(0, 60, 10)}) == 6


def test_the_stream_does_not_depend_on_the_batch_size() -> None:
    assert stream(15) == stream(6, global_batch=10) == stream(2, global_batch=30)


def test_a_step_needs_no_earlier_step() -> None:
    assert step_samples("abc", 7, 10, 4, 9).tolist() == stream(10)[36:]


@pytest.mark.parametrize("change", [{"seed": 8}, {"fingerprint": "abd"}])
def test_seed_and_data_change_the_order(change: dict[str, object]) -> None:
    assert stream(5, size=1000, **change) != stream(5, size=1000)


def test_the_limit_shortens_the_last_batch_and_empties_later_ones() -> None:
    whole = stream(4)
    sizes = [len(step_samples("abc", 7, 10, 4, step, limit=10)) for step in range(4)]
    assert sizes == [4, 4, 2, 0]
    assert stream(4, limit=10) == whole[:10]


def test_the_order_is_pinned() -> None:
    """Resumed runs rely on it: these numbers may change only together with the fingerprint's version."""
    assert step_samples("fingerprint", 0, 12, 12, 0).tolist() == [6, 0, 9, 8, 1, 4, 7, 5, 2, 10, 11, 3]


def test_samples_are_shuffled_uniformly() -> None:
    """The mean position of the first half of the data is the center, within sampling error."""
    order = step_samples("abc", 0, 100_000, 100_000, 0)
    first_half = np.flatnonzero(order < 50_000)
    assert abs(first_half.mean() - 50_000) < 5 * 100_000 / np.sqrt(12 * 50_000)


def test_the_returned_array_is_a_copy() -> None:
    step_samples("abc", 7, 10, 10, 0)[:] = 0
    assert sorted(step_samples("abc", 7, 10, 10, 0).tolist()) == list(range(10))


def test_an_empty_data_set_raises() -> None:
    with pytest.raises(ValueError, match="empty"):
        step_samples("abc", 0, 0, 4, 0)
