"""Transposition of bytes, tile by tile."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.triton_support import ceil_div, launch

_TILE = 128


@triton.jit
def _transpose(source, source_stride, out, out_stride, rows, columns, TILE: tl.constexpr):
    r = tl.program_id(0) * TILE + tl.arange(0, TILE)
    c = tl.program_id(1) * TILE + tl.arange(0, TILE)
    tile = tl.load(
        source + r[:, None].to(tl.int64) * source_stride + c[None, :],
        mask=(r[:, None] < rows) & (c[None, :] < columns),
        other=0,
    )
    tl.store(
        out + c[:, None].to(tl.int64) * out_stride + r[None, :],
        tl.trans(tile),
        mask=(c[:, None] < columns) & (r[None, :] < rows),
    )


def transpose(source: Tensor, out: Tensor) -> None:
    rows, columns = source.shape
    source, out = source.view(torch.uint8), out.view(torch.uint8)
    grid = (ceil_div(rows, _TILE), ceil_div(columns, _TILE))
    launch(_transpose, grid, source, source.stride(0), out, out.stride(0), rows, columns, TILE=_TILE, num_warps=4)
