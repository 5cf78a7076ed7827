"""Row-wise quantization and copy.

Quantization uses one program per row; rows too wide for registers are read twice, the second time from cache. The copy
uses one program per block of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.triton_support import (
    block_of,
    ceil_div,
    launch,
    nan_amax,
    nan_max,
    row_scale,
    row_warps,
    to_e4m3,
)

_MAX_BLOCK = 16384
_COPY_BLOCK = 4096
"""Columns per program of the copy."""


@triton.jit
def _values(x, multiplier, cols, columns, SCALED: tl.constexpr):
    values = tl.load(x + cols, mask=cols < columns, other=0.0).to(tl.float32)
    if SCALED:
        values *= tl.load(multiplier + cols, mask=cols < columns, other=0.0)
    return values


@triton.jit
def _quantize(
    x, x_stride, multiplier, out, out_stride, scales, columns,
    SCALED: tl.constexpr, ONE_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    out += row * out_stride
    cols = tl.arange(0, BLOCK)
    values = _values(x, multiplier, cols, columns, SCALED)
    amax = tl.abs(values)
    if not ONE_BLOCK:
        for start in range(BLOCK, columns, BLOCK):
            amax = nan_max(amax, tl.abs(_values(x, multiplier, start + cols, columns, SCALED)))
    scale = row_scale(nan_amax(amax, 0))
    tl.store(scales + row, scale)
    inverse = 1.0 / scale
    tl.store(out + cols, to_e4m3(values * inverse), mask=cols < columns)
    if not ONE_BLOCK:
        for start in range(BLOCK, columns, BLOCK):
            values = _values(x, multiplier, start + cols, columns, SCALED)
            tl.store(out + start + cols, to_e4m3(values * inverse), mask=start + cols < columns)


def quantize(x: Tensor, multiplier: Tensor | None, out: Tensor, scales: Tensor) -> None:
    rows, columns = x.shape
    block = min(block_of(columns), _MAX_BLOCK)
    launch(
        _quantize, (rows,),
        x, x.stride(0), multiplier, out, out.stride(0), scales, columns,
        SCALED=multiplier is not None, ONE_BLOCK=block >= columns, BLOCK=block, num_warps=row_warps(block),
    )  # fmt: skip


@triton.jit
def _copy(x, x_stride, out, out_stride, columns, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    cols = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + row * x_stride + cols, mask=cols < columns)
    tl.store(out + row * out_stride + cols, values.to(out.dtype.element_ty), mask=cols < columns)


def copy(x: Tensor, out: Tensor) -> None:
    rows, columns = x.shape
    block = min(block_of(columns), _COPY_BLOCK)
    blocks = ceil_div(columns, block)
    launch(
        _copy, (rows * blocks,),
        x, x.stride(0), out, out.stride(0), columns, BLOCKS=blocks, BLOCK=block, num_warps=row_warps(block),
    )  # fmt: skip
