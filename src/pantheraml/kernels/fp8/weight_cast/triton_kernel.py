"""Amax and e4m3 cast of weights. Reads and writes are row-major, 16 bytes per thread.

For a transposed output, the bytes of four rows in one column are packed into a 32-bit word, so that words are exchanged
between threads instead of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.triton_support import (
    E4M3_MAX,
    INTERPRETED,
    ceil_div,
    launch,
    nan_amax,
    nan_max,
    pow2_scale,
    to_e4m3,
)

ALIGNMENT = 16
"""Required alignment of row starts and of both dimensions, in values."""
_AMAX_ROWS, _AMAX_COLUMNS, _AMAX_PROGRAMS = 4, 1024, 1056  # eight programs per SM of an H200
_ROWS, _COLUMNS = 8, 512
_WORDS, _WIDTH = 32, 128  # transposed tile; a word holds four rows
_SCALES = 1024


@triton.jit
def _tensor_amax(
    weight, weight_stride, amax_bits, rows, columns, rows_per_program, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Amax of the tensor, as the bits of a non-negative float (NaN sorts highest)."""
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row_begin = tl.program_id(1) * rows_per_program
    row_end = tl.minimum(row_begin + rows_per_program, rows)
    amax = tl.zeros((ROWS, COLUMNS), tl.float32)
    for row in range(row_begin, row_end, ROWS):
        r = row + tl.arange(0, ROWS)
        mask = (r[:, None] < row_end) & (c[None, :] < columns)
        values = tl.load(weight + r[:, None].to(tl.int64) * weight_stride + c[None, :], mask=mask, other=0.0)
        amax = nan_max(amax, tl.abs(values.to(tl.float32)))
    tl.atomic_max(amax_bits, nan_amax(nan_amax(amax, 0), 0).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def _broadcast_scale(amax_bits, scales, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scale = pow2_scale(tl.load(amax_bits).to(tl.float32, bitcast=True), E4M3_MAX)
    tl.store(scales + offsets, tl.zeros((BLOCK,), tl.float32) + scale, mask=offsets < count)


@triton.jit
def _write(
    weight, weight_stride, scales, out, out_stride, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (r[:, None] < rows) & (c[None, :] < columns)
    inverse = 1.0 / tl.load(scales)
    rows64 = r[:, None].to(tl.int64)
    values = tl.load(weight + rows64 * weight_stride + c[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + rows64 * out_stride + c[None, :], to_e4m3(values * inverse), mask=mask)


@triton.jit
def _load_bytes(ptrs, mask, inverse):
    """Load one row of each word as e4m3 into the low byte."""
    values = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    return to_e4m3(values * inverse).to(tl.uint8, bitcast=True).to(tl.uint32)


@triton.jit
def _write_transposed(
    weight, weight_stride, scales, out, out_vectors, vectors, columns, WORDS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """`out` [columns, rows] is in words; its rows are `vectors` vectors of 16 bytes long, `out_vectors` apart."""
    w = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (w[:, None] < vectors * 4) & (c[None, :] < columns)
    inverse = 1.0 / tl.load(scales)
    ptrs = weight + (w[:, None] * 4).to(tl.int64) * weight_stride + c[None, :]
    words = _load_bytes(ptrs, mask, inverse)
    for i in tl.static_range(1, 4):
        words |= _load_bytes(ptrs + i * weight_stride, mask, inverse) << (8 * i)
    to = out + c[:, None].to(tl.int64) * (out_vectors * 4) + w[None, :]
    tl.store(to, tl.trans(words), mask=(c[:, None] < columns) & (w[None, :] < vectors * 4))


def scales(weights: Sequence[Tensor], out: Tensor) -> None:
    amax_bits = torch.zeros(1, dtype=torch.int32, device=out.device)
    for weight in weights:
        rows, columns = weight.shape
        column_programs = ceil_div(columns, _AMAX_COLUMNS)
        rows_per_program = ceil_div(ceil_div(rows, max(1, _AMAX_PROGRAMS // column_programs)), _AMAX_ROWS) * _AMAX_ROWS
        launch(
            _tensor_amax, (column_programs, ceil_div(rows, rows_per_program)),
            weight, weight.stride(0), amax_bits, rows, columns, rows_per_program,
            ROWS=_AMAX_ROWS, COLUMNS=_AMAX_COLUMNS,
        )  # fmt: skip
    count = out.shape[0]
    launch(_broadcast_scale, (ceil_div(count, _SCALES),), amax_bits, out, count, BLOCK=_SCALES)


def can_write(weight: Tensor, out: Tensor) -> bool:
    """Whether `write` supports these matrices. Not from float32: results were wrong on an H200 (Triton 3.6)."""
    sizes = (*weight.shape, weight.stride(0), max(out.stride()), out.data_ptr())
    supported = weight.dtype == torch.bfloat16 or INTERPRETED
    return supported and weight.stride(1) == 1 and all(size % ALIGNMENT == 0 for size in sizes)


def write(weight: Tensor, scales: Tensor, out: Tensor) -> None:
    rows, columns = weight.shape
    if out.stride(1) == 1:
        grid = (ceil_div(rows, _ROWS), ceil_div(columns, _COLUMNS))
        launch(
            _write, grid, weight, weight.stride(0), scales, out, out.stride(0), rows, columns,
            ROWS=_ROWS, COLUMNS=_COLUMNS,
        )  # fmt: skip
        return
    grid = (ceil_div(rows, 4 * _WORDS), ceil_div(columns, _WIDTH))
    launch(
        _write_transposed, grid,
        weight, weight.stride(0), scales, out.T.view(torch.uint32), out.stride(1) // 16, rows // 16, columns,
        WORDS=_WORDS, COLUMNS=_WIDTH,
    )  # fmt: skip
