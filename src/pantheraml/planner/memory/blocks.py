"""Sizes as torch's allocator counts them: https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management.

`max_memory_allocated` counts blocks, not tensors. Sizes are rounded up to 512 bytes. A tensor of 10 MiB or more gets
memory from the driver in multiples of 2 MiB, and a rest of at most 1 MiB is not split off: a tensor of 33 MiB counts as
34.
"""

from __future__ import annotations

from collections.abc import Iterable

MIB = 1 << 20

UNIT = 512
LARGE = 10 * MIB
"""From this size on, memory comes from the driver for this tensor alone."""
SEGMENT = 2 * MIB
UNSPLIT = 1 * MIB
"""A rest up to this size stays part of the block."""


def block_bytes(size: int) -> int:
    """Bytes that the allocator counts for a tensor of `size` bytes in fresh memory."""
    size = round_up(size, UNIT)
    if size < LARGE:
        return size
    segment = round_up(size, SEGMENT)
    return segment if segment - size <= UNSPLIT else size


def blocks_bytes(sizes: Iterable[int]) -> int:
    return sum(map(block_bytes, sizes))


def round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
