"""Which columns of an operand belong to which adapter: tables that the kernels look up.

A span is (start, width, first column, rank): the part of a row that has adapter columns of its own, and which.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 256
"""Columns of a block of the gradient."""

PROJECT_ROWS = 64
"""Rows that one program of `project` takes."""

Span = tuple[int, int, int, int]


def segments_of(spans: Sequence[Span], device: torch.device) -> Tensor:
    """Spans as `project` reads them, [spans, 4] int32."""
    return torch.tensor(spans, dtype=torch.int32).view(-1, 4).to(device)


def blocks_of(spans: Sequence[Span], device: torch.device) -> Tensor:
    """Spans as `adapter_gradients` reads them: [blocks, (start, end, first column, rank)] int32, each of `BLOCK`
    columns or what is left of its span."""
    blocks = [
        (begin, min(begin + BLOCK, start + width), column, rank)
        for start, width, column, rank in spans
        for begin in range(start, start + width, BLOCK)
    ]
    return torch.tensor(blocks, dtype=torch.int32).view(-1, 4).to(device)
