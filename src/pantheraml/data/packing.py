"""Sequence packing by best-fit-decreasing.

Documents are placed longest first, each into the fullest sequence that still has space; none is ever split. This needs
all lengths at once, so it runs per window: large enough that the few half-empty sequences at its end do not matter, and
small enough to bound memory.
"""

from __future__ import annotations

import bisect

import numpy as np

from pantheraml.data.documents import Ints

_WINDOW_SEQUENCES = 1024
_WINDOW_TOKENS = 8 << 20
_LARGEST_WINDOW = 32 << 20


def window_tokens(seq_len: int) -> int:
    """Return the number of tokens to collect before packing them.

    1024 sequences' worth; for long sequences at most 8 Mi tokens (32 MiB) unless that is fewer than 64 sequences, and
    for very long ones at most 32 Mi tokens, which is 16 sequences of the maximum data.seq_len.
    """
    return max(min(64 * seq_len, _LARGEST_WINDOW), min(_WINDOW_SEQUENCES * seq_len, _WINDOW_TOKENS))


def best_fit_decreasing(lengths: Ints, capacity: int) -> list[list[int]]:
    """Return the document indices of each sequence; a pure function of `lengths` and `capacity`.

    Open sequences are indexed by their free space, in a sorted list, so that the tightest fit is found by bisection.
    Memory grows with the number of documents, not with `capacity`.
    """
    packs: list[list[int]] = []
    by_free: dict[int, list[int]] = {}
    free_sizes: list[int] = []
    order = np.argsort(-lengths, kind="stable")
    for document, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        tightest = bisect.bisect_left(free_sizes, length)
        if tightest < len(free_sizes):
            free = free_sizes[tightest]
            pack = by_free[free].pop()
            if not by_free[free]:
                del by_free[free], free_sizes[tightest]
            packs[pack].append(document)
        else:
            free = capacity
            pack = len(packs)
            packs.append([document])
        remaining = free - length
        if remaining in by_free:
            by_free[remaining].append(pack)
        elif remaining:
            by_free[remaining] = [pack]
            bisect.insort(free_sizes, remaining)
    return packs
