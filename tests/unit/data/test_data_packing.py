from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from pydantic import ValidationError

from pantheraml.data.packing import best_fit_decreasing, window_tokens
from pantheraml.specs.train import DataConfig


def reference(lengths: list[int], capacity: int) -> list[list[int]]:
    """Quadratic textbook best-fit-decreasing; ties go to the most recently filled sequence."""
    packs: list[list[int]] = []
    free: list[int] = []
    filled: list[int] = []  # when each sequence was last filled
    for turn, document in enumerate(sorted(range(len(lengths)), key=lambda i: -lengths[i])):
        fits = [pack for pack in range(len(packs)) if free[pack] >= lengths[document]]
        if fits:
            best = min(fits, key=lambda pack: (free[pack], -filled[pack]))
            packs[best].append(document)
            free[best] -= lengths[document]
            filled[best] = turn
        else:
            packs.append([document])
            free.append(capacity - lengths[document])
            filled.append(turn)
    return packs


@pytest.mark.parametrize("capacity", [8, 50, 333])
def test_packing_matches_a_best_fit_decreasing_reference(capacity: int) -> None:
    random = np.random.default_rng(capacity)
    lengths = random.integers(1, capacity + 1, size=400).astype(np.int32)
    assert best_fit_decreasing(lengths, capacity) == reference(lengths.tolist(), capacity)


def test_every_document_is_packed_once_and_no_sequence_overflows() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, size=1000).astype(np.int32)
    packs = best_fit_decreasing(lengths, 99)
    assert sorted(document for pack in packs for document in pack) == list(range(1000))
    assert max(int(lengths[pack].sum()) for pack in packs) <= 99


def test_no_documents_need_no_sequences() -> None:
    assert best_fit_decreasing(np.array([], dtype=np.int32), 16) == []


@pytest.mark.parametrize("seq_len", [512, 2048, 8192])
@pytest.mark.parametrize("sigma", [0.5, 1.0, 1.5])
def test_one_window_of_log_normal_lengths_is_packed_to_97_percent(seq_len: int, sigma: float) -> None:
    random = np.random.default_rng(1)
    lengths = np.exp(random.normal(np.log(seq_len / 8), sigma, size=200_000)).astype(np.int32).clip(1, seq_len)
    window = lengths[: int(np.searchsorted(np.cumsum(lengths), window_tokens(seq_len)))]
    packs = best_fit_decreasing(window, seq_len)
    assert window.sum() / (len(packs) * seq_len) >= 0.97


def test_packing_memory_does_not_grow_with_sequence_length() -> None:
    lengths = np.random.default_rng(2).integers(1, 5000, size=2000).astype(np.int32)
    tracemalloc.start()
    packs = best_fit_decreasing(lengths, 10_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(packs) == 1
    assert peak < 1 << 20


def test_the_packing_window_is_bounded_for_the_longest_sequences() -> None:
    longest = 1 << 21
    assert window_tokens(longest) == 16 * longest
    assert DataConfig(path="x", seq_len=longest).seq_len == longest
    with pytest.raises(ValidationError, match="2097152"):
        DataConfig(path="x", seq_len=10_000_000)
