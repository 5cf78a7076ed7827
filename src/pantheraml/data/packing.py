"""Packing: which documents share a sequence, chosen by best-fit-decreasing.

Documents are placed longest first, each into the fullest sequence that still has room; none is ever split. That needs
all lengths at once, so it is done window by window: a window is big enough that the few half-empty sequences at its end
do not matter, and small enough to bound memory.
"""

from __future__ import annotations

import bisect

import numpy as np

from pantheraml.data.documents import Ints

_WINDOW_SEQUENCES = 1024
_WINDOW_TOKENS = 8 << 20
_LARGEST_WINDOW = 32 << 20


def window_tokens(seq_len: int) -> int:
    """How many tokens to gather before packing them.

    1024 sequences' worth; for long sequences no more than 8 Mi tokens (32 MiB) unless that is below 64 sequences, and
    for very long ones no more than 32 Mi tokens, which is 16 of the longest sequences that there may be.
    """
    return max(min(64 * seq_len, _LARGEST_WINDOW), min(_WINDOW_SEQUENCES * seq_len, _WINDOW_TOKENS))


def best_fit_decreasing(lengths: Ints, capacity: int) -> list[list[int]]:
    """Document indices of each sequence. The result depends on `lengths` and `capacity` alone.

    Open sequences are kept by the room they have left, and those rooms in order, so that the tightest fit is found by
    bisection. Memory grows with the number of documents, not with `capacity`.
    """
    packs: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    order = np.argsort(-lengths, kind="stable")
    for document, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        place = bisect.bisect_left(rooms, length)
        if place < len(rooms):
            room = rooms[place]
            pack = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[place]
            packs[pack].append(document)
        else:
            room = capacity
            pack = len(packs)
            packs.append([document])
        left = room - length
        if left in by_room:
            by_room[left].append(pack)
        elif left:
            by_room[left] = [pack]
            bisect.insort(rooms, left)
    return packs
