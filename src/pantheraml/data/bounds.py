"""Resource limits per row, so that a small file or a chat template cannot exhaust the host.

Each limit is far above what real data needs. Code that hits one raises an error that names it.
"""

from __future__ import annotations

from pantheraml.base.errors import DataError
from pantheraml.base.memory_room import MAX_GROWTH_BYTES

MAX_ROW_BYTES = 16 << 20
"""Maximum size of a row: a line, a CSV record, an element of a JSON array, or the values of an Arrow row.

It holds more text than the largest data.seq_len can use. Tokenizers need up to 190 bytes of memory per byte of text:
3.1 GiB were measured for a row of 16 MiB.
"""
MAX_NESTING = 64
"""Maximum nesting of lists and objects in a row; keeps recursive code far from Python's recursion limit."""
MAX_DECODE_BYTES = MAX_GROWTH_BYTES
"""Maximum memory growth while decoding one Arrow or Parquet batch, or rendering one conversation."""

ROWS_BASE, ROWS_PER_BYTE = 65_536, 8
DECODED_BASE, DECODED_FACTOR = 1 << 30, 1_024
"""An Arrow or Parquet file of n bytes may hold ROWS_BASE + ROWS_PER_BYTE * n rows, and decode to DECODED_BASE +
DECODED_FACTOR * n bytes: a few hundred bytes of such a file can repeat one value without end."""


def format_mib(size: int) -> str:
    return f"{size >> 20} MiB"


LONG_ROW = f"longer than {format_mib(MAX_ROW_BYTES)}, the maximum for one row"


def row_too_long(where: str) -> DataError:
    return DataError(
        f"A row is {LONG_ROW}.",
        where=where,
        fix="Split it into several rows. If it should already be several, check the line endings and quotes.",
    )


def too_deep(value: object) -> bool:
    """Return whether lists and objects nest deeper than MAX_NESTING. Breadth-first, so depth needs no recursion."""
    level = [value]
    for _ in range(MAX_NESTING + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True
