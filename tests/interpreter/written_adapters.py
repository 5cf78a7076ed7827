"""Layers that share a matrix in two layouts, and what writing their adapters changes: ours beside the reference's."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pantheraml.kernels.e4m3 import E4M3
from pantheraml.kernels.lora_columns import Adapter, AdapterPlaces, AdapterTable
from pantheraml.kernels.lora_columns.reference import reference_write
from tests.interpreter.comparison import ULPS, assert_same_codes

ROOM = 640
SHAPES = {
    "one": ((1,), (1040,), 272),
    "16": ((16, 16, 16), (1040, 272, 16), 1552),
    "24": ((24, 24), (688, 272), 720),
    "64": ((64,), (144,), 272),
    "200": ((200, 200), (48, 80), 112),
    "different": ((16, 1, 200, 5), (528, 48, 16, 80), 144),
}
"""Ranks and heights of the layers, and their width: no multiples of a tile."""


class Written(NamedTuple):
    """All of it holds ones before."""

    first: Tensor
    """[height, width + room]."""
    down: Tensor
    """[ranks, width]."""
    second: Tensor
    """[width, height + room]."""
    up: Tensor
    """[largest rank, height]."""
    units: Tensor
    """[2, room]."""


Values = list[tuple[Tensor, Tensor]]


def values_of(shape: str, *, dtype: torch.dtype, device: torch.device, offset: int = 0) -> Values:
    """A and B of each layer, `offset` values after where memory begins."""
    ranks, heights, width = SHAPES[shape]

    def at_offset(rows: int, columns: int) -> Tensor:
        flat = 0.1 * torch.randn(rows * columns + offset, device=device)
        return flat.to(dtype)[offset:].view(rows, columns)

    return [(at_offset(rank, width), at_offset(height, rank)) for rank, height in zip(ranks, heights, strict=True)]


def arranged(
    shape: str, values: Values, scales: Tensor | None, element: torch.dtype, *, twice: bool
) -> tuple[Written, list[Adapter]]:
    ranks, heights, width = SHAPES[shape]
    height, device = sum(heights), values[0][0].device
    sizes = (height, width + ROOM), (sum(ranks), width), (width, height + ROOM), (max(ranks), height)
    written = Written(*(torch.ones(size, device=device).to(element) for size in sizes), torch.ones(2, ROOM).to(device))
    adapters, start, column = [], 0, 0
    for rank, size, (down, up) in zip(ranks, heights, values, strict=True):
        rows, columns = slice(start, start + size), slice(column, column + rank)
        places = AdapterPlaces(
            matrix_up=written.first[rows, width + column : width + column + rank],
            matrix_down=written.down[columns],
            scales=None if scales is None else scales[rows],
            factor_up=written.up[:rank, rows],
            unit_down=written.units[0, columns],
            unit_up=written.units[1, columns],
            turned_down=written.second[:, height + column : height + column + rank] if twice else None,
        )
        adapters.append(Adapter(down, up, 0.5 + len(adapters), places))
        start, column = rows.stop, columns.stop
    return written, adapters


def check_written(shape: str, values: Values, element: torch.dtype, *, twice: bool) -> None:
    """Also that nothing else is written."""
    ranks, heights, _ = SHAPES[shape]
    quantised, device = element == E4M3, values[0][0].device
    scales = torch.rand(sum(heights), device=device) + 0.5 if quantised else None
    ours, adapters = arranged(shape, values, scales, element, twice=twice)
    AdapterTable(adapters).write()
    theirs, adapters = arranged(shape, values, scales, element, twice=twice)
    for down, up, scaling, places in adapters:
        reference_write(down, up, scaling, *places)
    for mine, reference in zip(ours[:4], theirs[:4], strict=True):
        if quantised:
            assert_same_codes(mine, reference)
        else:
            assert torch.equal(mine, reference)
    torch.testing.assert_close(ours.units, theirs.units, rtol=ULPS, atol=0)
    turned = ours.second[:, sum(heights) :][:, : sum(ranks)].float()
    assert torch.equal(turned, ours.down.float().T if twice else torch.ones_like(turned))
