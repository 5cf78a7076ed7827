"""torch's caching allocator, simulated: what it takes from the driver for a sequence of tensors.

By the rules of torch 2.4 to 2.13 (c10/cuda/CUDACachingAllocator.cpp) with their defaults, for one stream: sizes are
rounded to 512 bytes; tensors up to 1 MiB come from segments of 2 MiB, those below 10 MiB from segments of 20 MiB, and
larger ones from segments of their own, rounded to 2 MiB. A freed block joins its free neighbours in the segment and is
taken again for the next tensor that it is the smallest block for; what is left of it is split off, except for a rest of
at most 1 MiB among large tensors.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from pantheraml.planner.memory.blocks import LARGE, MIB, SEGMENT, UNIT, UNSPLIT, round_up

SMALL = 1 * MIB
SMALL_SEGMENT, SHARED_SEGMENT = 2 * MIB, 20 * MIB


class Block:
    """A part of a segment."""

    __slots__ = ("after", "before", "is_free", "number", "size", "small")

    def __init__(self, size: int, number: int, *, small: bool) -> None:
        self.size, self.number, self.small, self.is_free = size, number, small, False
        self.before: Block | None = None
        self.after: Block | None = None


class Allocator:
    """Counts bytes; there is no memory."""

    def __init__(self) -> None:
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        """Free blocks of small and of large tensors, with size and number, the smallest first."""
        self._count = 0

    def allocate(self, size: int) -> Block:
        size = round_up(max(size, 1), UNIT)
        small = size <= SMALL
        free = self._free[small]
        place = bisect_left(free, (size,))
        if place < len(free):
            block = free.pop(place)[2]
            block.is_free = False
        else:
            segment = SMALL_SEGMENT if small else SHARED_SEGMENT if size < LARGE else round_up(size, SEGMENT)
            block = self._block(segment, small=small)
            self.reserved += segment
            self.peak_reserved = max(self.peak_reserved, self.reserved)
        rest = block.size - size
        if rest >= UNIT if small else rest > UNSPLIT:
            self._split(block, size)
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return block

    def free(self, block: Block) -> None:
        self.allocated -= block.size
        before, after = block.before, block.after
        if before is not None and before.is_free:
            self._take(before)
            block.size += before.size
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and after.is_free:
            self._take(after)
            block.size += after.size
            block.after = after.after
            if block.after is not None:
                block.after.before = block
        self._give(block)

    def empty_cache(self) -> None:
        """Give segments back to the driver that nothing is left of."""
        found = (each for free in self._free.values() for _, _, each in free)
        for block in [each for each in found if each.before is None and each.after is None]:
            self._take(block)
            self.reserved -= block.size

    def _block(self, size: int, *, small: bool) -> Block:
        self._count += 1
        return Block(size, self._count, small=small)

    def _split(self, block: Block, size: int) -> None:
        rest = self._block(block.size - size, small=block.small)
        rest.before, rest.after, block.size = block, block.after, size
        if block.after is not None:
            block.after.before = rest
        block.after = rest
        self._give(rest)

    def _give(self, block: Block) -> None:
        block.is_free = True
        insort(self._free[block.small], (block.size, block.number, block))

    def _take(self, block: Block) -> None:
        block.is_free = False
        free = self._free[block.small]
        del free[bisect_left(free, (block.size, block.number))]
