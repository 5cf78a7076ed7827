"""Bounds on what one row may cost, so that a small file or a chat template cannot take the machine.

Each bound is far above what a row of real data needs. Whoever meets one raises an error that names it.
"""

from __future__ import annotations

from pantheraml.base.errors import DataError
from pantheraml.base.memory_room import ROOM

ROW_BYTES = 16 << 20
"""The longest row: of a line, of a CSV record, of an element of a JSON array, of the values of an Arrow row.

It is more text than the longest data.seq_len takes. A tokenizer needs up to 190 bytes of memory for each byte of text:
3.1 GiB were measured for a row of 16 MiB.
"""
NESTING = 64
"""The deepest nesting of lists and objects in a row; code that walks a row recursively stays far from its own limit."""
DECODING_ROOM = ROOM
"""Memory that may be added while one batch of an Arrow or Parquet file is decoded, or one conversation rendered."""

ROWS_BASE, ROWS_PER_BYTE = 65_536, 8
DECODED_BASE, DECODED_FACTOR = 1 << 30, 1_024
"""An Arrow or Parquet file may hold ROWS_BASE + ROWS_PER_BYTE x its bytes rows, and its values may take DECODED_BASE +
DECODED_FACTOR x its bytes: in a few hundred bytes such a file can repeat one value without end."""


def mebibytes(size: int) -> str:
    return f"{size >> 20} MiB"


LONG_ROW = f"longer than {mebibytes(ROW_BYTES)}, the most that one row may hold"


def row_too_long(where: str) -> DataError:
    return DataError(
        f"A row is {LONG_ROW}.",
        where=where,
        todo="Divide it into several rows. If it should be several already, check the line ends and the quotes.",
    )


def too_deep(value: object) -> bool:
    """Whether lists and objects are nested deeper than NESTING; walks level by level, so depth itself costs nothing."""
    level = [value]
    for _ in range(NESTING + 1):
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
