"""Limit the memory growth of this process during a block of code."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_GROWTH_BYTES = 2 << 30


@contextlib.contextmanager
def memory_limit(budget: int = MAX_GROWTH_BYTES) -> Iterator[None]:
    """Limit the growth of the process's address space to `budget` bytes; allocations beyond it raise MemoryError.

    The decoded size of a compressed file is known only from its own metadata, which is not trusted here. Do not use
    around code that aborts the process when an allocation fails, such as Rust's.
    """
    if sys.platform != "linux":  # the current address space is known only on Linux
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _address_space() + budget
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
