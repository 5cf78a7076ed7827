"""Packing: which documents share a sequence, chosen by best-fit-decreasing.

Documents are placed longest first, each into the fullest sequence that still has room; none is ever split. That needs
all lengths at once, so it is done window by window: a window is big enough that the few half-empty sequences at its end
do not matter, and small enough to bound memory.
"""

from __future__ import annotations

import numpy as np

from pantheraml.data.documents import Ints

_WINDOW_SEQUENCES = 1024
_WINDOW_TOKENS = 8 << 20


def window_tokens(seq_len: int) -> int:
    """How many tokens to gather before packing them.

    1024 sequences' worth, and for long sequences no more than 8 Mi tokens (32 MiB), but never fewer than 64 sequences.
    """
    return max(64 * seq_len, min(_WINDOW_SEQUENCES * seq_len, _WINDOW_TOKENS))


def best_fit_decreasing(lengths: Ints, capacity: int) -> list[list[int]]:
    """Document indices of each sequence. The result depends on `lengths` and `capacity` alone.

    Open sequences are kept by the room they have left, and a big integer has bit r set where one with room r exists:
    shifting it right by a document's length and isolating the lowest bit finds the tightest fit in O(capacity / 64).
    """
    packs: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0
    order = np.argsort(-lengths, kind="stable")
    for document, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            pack = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
            packs[pack].append(document)
        else:
            room = capacity
            pack = len(packs)
            packs.append([document])
        left = room - length
        if left:
            by_room[left].append(pack)
            rooms |= 1 << left
    return packs
