from __future__ import annotations

import numpy as np
import pytest

from pantheraml.data.documents import as_ints, concatenate_runs, loss_mask, runs_from_mask, truncate_runs


@pytest.mark.parametrize(
    ("mask", "runs"),
    [
        ([0, 0, 1, 1, 0], [2, 2]),
        ([1, 1], [0, 2]),
        ([0, 1, 0, 1, 1], [1, 1, 1, 2]),
        ([0, 0, 0], []),
        ([], []),
    ],
)
def test_runs_and_masks_round_trip(mask: list[int], runs: list[int]) -> None:
    found = runs_from_mask(np.array(mask, dtype=np.int8))
    assert found.tolist() == runs
    assert loss_mask(found, len(mask)).tolist() == [bool(bit) for bit in mask]


@pytest.mark.parametrize("length", range(9))
def test_truncating_runs_matches_truncating_the_mask(length: int) -> None:
    mask = np.array([0, 1, 1, 0, 0, 1, 0, 1], dtype=np.int8)
    cut = truncate_runs(runs_from_mask(mask), length)
    assert cut.tolist() == runs_from_mask(mask[:length]).tolist()


def test_concatenating_runs_matches_concatenating_masks() -> None:
    masks = [np.array(mask, dtype=np.int8) for mask in ([0, 1, 0], [0, 0, 1, 1], [0, 1, 0, 1, 0])]
    runs = as_ints(list(concatenate_runs((runs_from_mask(mask), len(mask)) for mask in masks)))
    whole = np.concatenate(masks)
    assert loss_mask(runs, len(whole)).tolist() == whole.astype(bool).tolist()
