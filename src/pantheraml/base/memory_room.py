"""A bound on the memory that a piece of work may add to this process."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

ROOM = 2 << 30


@contextlib.contextmanager
def memory_room(room: int = ROOM) -> Iterator[None]:
    """Let the process grow by no more than `room` bytes; an allocation beyond that fails (MemoryError).

    What a compressed file decodes to is known only from what the file says of itself. This bound does not believe it.
    Not around code that ends the process when memory runs out, such as Rust's.
    """
    if sys.platform != "linux":  # nowhere else can it be told how large the process is already
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _address_space() + room
    if soft != resource.RLIM_INFINITY and soft <= limit:
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()
