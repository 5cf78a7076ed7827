"""Quantisation: one program a row; rows too wide for the registers are read twice (the second time from the cache).
Copy: one program a row, or a piece of a wide one."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.triton_support import block_of, ceil_div, larger, largest, launch, row_scale, row_warps, to_e4m3

_WIDEST = 16384
_PIECE = 4096
"""Of a row, for one program where rows are only copied."""


@triton.jit
def _values(x, multiplier, at, columns, SCALED: tl.constexpr):
    values = tl.load(x + at, mask=at < columns, other=0.0).to(tl.float32)
    if SCALED:
        values *= tl.load(multiplier + at, mask=at < columns, other=0.0)
    return values


@triton.jit
def _quantise(
    x, x_stride, multiplier, out, out_stride, scales, columns,
    SCALED: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    out += row * out_stride
    at = tl.arange(0, BLOCK)
    values = _values(x, multiplier, at, columns, SCALED)
    most = tl.abs(values)
    if not WHOLE:
        for start in range(BLOCK, columns, BLOCK):
            most = larger(most, tl.abs(_values(x, multiplier, start + at, columns, SCALED)))
    scale = row_scale(largest(most, 0))
    tl.store(scales + row, scale)
    inverse = 1.0 / scale
    tl.store(out + at, to_e4m3(values * inverse), mask=at < columns)
    if not WHOLE:
        for start in range(BLOCK, columns, BLOCK):
            values = _values(x, multiplier, start + at, columns, SCALED)
            tl.store(out + start + at, to_e4m3(values * inverse), mask=start + at < columns)


def quantise(x: Tensor, multiplier: Tensor | None, out: Tensor, scales: Tensor) -> None:
    rows, columns = x.shape
    block = min(block_of(columns), _WIDEST)
    launch(
        _quantise, (rows,),
        x, x.stride(0), multiplier, out, out.stride(0), scales, columns,
        SCALED=multiplier is not None, WHOLE=block >= columns, BLOCK=block, num_warps=row_warps(block),
    )  # fmt: skip


@triton.jit
def _copy(x, x_stride, out, out_stride, columns, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // PIECES).to(tl.int64)
    at = tl.program_id(0) % PIECES * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + row * x_stride + at, mask=at < columns)
    tl.store(out + row * out_stride + at, values.to(out.dtype.element_ty), mask=at < columns)


def copy(x: Tensor, out: Tensor) -> None:
    rows, columns = x.shape
    block = min(block_of(columns), _PIECE)
    pieces = ceil_div(columns, block)
    launch(
        _copy, (rows * pieces,),
        x, x.stride(0), out, out.stride(0), columns, PIECES=pieces, BLOCK=block, num_warps=row_warps(block),
    )  # fmt: skip
