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

    __slots__ = ("after", "before", "number", "size", "small")

    def __init__(self, size: int, number: int, *, small: bool) -> None:
        self.size, self.number, self.small = size, number, small
        self.before: Block | None = None
        self.after: Block | None = None


class Allocator:
    """Counts bytes; there is no memory."""

    def __init__(self) -> None:
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        """Free blocks of small and of large tensors: size and number, the smallest first."""
        self._blocks: dict[int, Block] = {}
        """Free blocks by number."""
        self._count = 0

    def allocate(self, size: int) -> Block:
        size = round_up(max(size, 1), UNIT)
        small = size <= SMALL
        free = self._free[small]
        place = bisect_left(free, (size, 0))
        if place < len(free):
            block = self._blocks.pop(free.pop(place)[1])
        else:
            segment = SMALL_SEGMENT if small else SHARED_SEGMENT if size < LARGE else round_up(size, SEGMENT)
            block = self._block(segment, small=small)
            self.reserved += segment
            self.peak_reserved = max(self.peak_reserved, self.reserved)
        rest = block.size - size
        if rest >= UNIT if small else rest > UNSPLIT:
            self._split(block, size)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        self.allocated -= block.size
        for other in (block.before, block.after):
            if other is not None and other.number in self._blocks:
                self._take(other)
                block.size += other.size
                if other is block.before:
                    block.before = other.before
                    if other.before is not None:
                        other.before.after = block
                else:
                    block.after = other.after
                    if other.after is not None:
                        other.after.before = block
        self._give(block)

    def empty_cache(self) -> None:
        """Give segments back to the driver that nothing is left of."""
        whole = [each for each in self._blocks.values() if each.before is None and each.after is None]
        for block in whole:
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
        self._blocks[block.number] = block
        insort(self._free[block.small], (block.size, block.number))

    def _take(self, block: Block) -> None:
        del self._blocks[block.number]
        free = self._free[block.small]
        del free[bisect_left(free, (block.size, block.number))]
