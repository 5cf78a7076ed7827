"""Test cases for `AdapterTable.write`: layers that share a matrix, compared with the reference."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pantheraml.kernels.fp8.e4m3 import E4M3
from pantheraml.kernels.lora_columns import Adapter, AdapterBuffers, AdapterTable
from pantheraml.kernels.lora_columns.reference import reference_write
from tests.interpreter.comparison import ULPS, assert_same_codes

PAD_COLS = 640
SHAPES = {
    "one": ((1,), (1040,), 272),
    "16": ((16, 16, 16), (1040, 272, 16), 1552),
    "24": ((24, 24), (688, 272), 720),
    "64": ((64,), (144,), 272),
    "200": ((200, 200), (48, 80), 112),
    "different": ((16, 1, 200, 5), (528, 48, 16, 80), 144),
}
"""Ranks and heights of the layers, and their width; not multiples of a tile."""


class Written(NamedTuple):
    """Buffers of all adapters, initialized with ones."""

    first: Tensor
    """[height, width + PAD_COLS]."""
    down: Tensor
    """[ranks, width]."""
    up: Tensor
    """[largest rank, height]."""
    column_scales: Tensor
    """[2, PAD_COLS]."""


Values = list[tuple[Tensor, Tensor]]


def values_of(shape: str, *, dtype: torch.dtype, device: torch.device, offset: int = 0) -> Values:
    """A and B of each layer, starting `offset` values into their allocation."""
    ranks, heights, width = SHAPES[shape]

    def at_offset(rows: int, columns: int) -> Tensor:
        flat = 0.1 * torch.randn(rows * columns + offset, device=device)
        return flat.to(dtype)[offset:].view(rows, columns)

    return [(at_offset(rank, width), at_offset(height, rank)) for rank, height in zip(ranks, heights, strict=True)]


def allocate(shape: str, values: Values, scales: Tensor | None, element: torch.dtype) -> tuple[Written, list[Adapter]]:
    ranks, heights, width = SHAPES[shape]
    height, device = sum(heights), values[0][0].device
    sizes = (height, width + PAD_COLS), (sum(ranks), width), (max(ranks), height)
    written = Written(
        *(torch.ones(size, device=device).to(element) for size in sizes), torch.ones(2, PAD_COLS).to(device)
    )
    adapters, start, column = [], 0, 0
    for rank, size, (down, up) in zip(ranks, heights, values, strict=True):
        rows, columns = slice(start, start + size), slice(column, column + rank)
        buffers = AdapterBuffers(
            matrix_up=written.first[rows, width + column : width + column + rank],
            matrix_down=written.down[columns],
            scales=None if scales is None else scales[rows],
            factor_up=written.up[:rank, rows],
            scale_down=written.column_scales[0, columns],
            scale_up=written.column_scales[1, columns],
        )
        adapters.append(Adapter(down, up, 0.5 + len(adapters), buffers))
        start, column = rows.stop, columns.stop
    return written, adapters


def check_written(shape: str, values: Values, element: torch.dtype) -> None:
    """Check the written values, and that nothing else is written."""
    heights = SHAPES[shape][1]
    quantized, device = element == E4M3, values[0][0].device
    scales = torch.rand(sum(heights), device=device) + 0.5 if quantized else None
    ours, adapters = allocate(shape, values, scales, element)
    AdapterTable(adapters).write()
    theirs, adapters = allocate(shape, values, scales, element)
    for down, up, scaling, buffers in adapters:
        reference_write(down, up, scaling, *buffers)
    for actual, reference in zip(ours[:3], theirs[:3], strict=True):
        if quantized:
            assert_same_codes(actual, reference)
        else:
            assert torch.equal(actual, reference)
    torch.testing.assert_close(ours.column_scales, theirs.column_scales, rtol=ULPS, atol=0)
