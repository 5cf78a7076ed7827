"""Lookup tables that map the columns of an operand to adapters.

A segment is (start, width, first column, rank): the slice of a row that one adapter projects, and its padding columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 256
"""Columns per block of the gradient."""

PROJECT_ROWS = 64
"""Rows per program of `project`."""

Segment = tuple[int, int, int, int]


def segment_table(segments: Sequence[Segment], device: torch.device) -> Tensor:
    """Segments as `project` reads them, [segments, 4] int32."""
    return torch.tensor(segments, dtype=torch.int32).view(-1, 4).to(device)


def block_table(segments: Sequence[Segment], device: torch.device) -> Tensor:
    """Segments split into blocks of at most `BLOCK` columns, as `adapter_gradients` reads them: [blocks, (start, end,
    first column, rank)] int32."""
    blocks = [
        (begin, min(begin + BLOCK, start + width), column, rank)
        for start, width, column, rank in segments
        for begin in range(start, start + width, BLOCK)
    ]
    return torch.tensor(blocks, dtype=torch.int32).view(-1, 4).to(device)
