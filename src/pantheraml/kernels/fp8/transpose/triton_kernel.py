"""Tiled transpose of e4m3 rows, with optional rescaling.

The bytes of four rows in one column are packed into a 32-bit word, so that words are exchanged between threads instead
of bytes. A tile is 128 x 128: reads and writes are 128-byte lines, 16 bytes per thread.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.triton_support import (
    E4M3_MAX,
    ceil_div,
    from_e4m3,
    launch,
    nan_amax,
    nan_max,
    pow2_scale,
    to_e4m3,
)

ALIGNMENT = 16
"""Required alignment of row starts and row lengths, in bytes."""
_WORDS, _COLUMNS = 32, 128  # tile size; a word holds four rows
_AMAX_ROWS, _AMAX_COLUMNS, _AMAX_PROGRAMS = 16, 256, 1056  # eight programs per SM of an H200


@triton.jit
def _column_amax(
    qdata, qdata_stride, factors, amax_bits, rows, columns, rows_per_program, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Amax per column, as the bits of non-negative floats (NaN sorts highest)."""
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row_begin = tl.program_id(1) * rows_per_program
    row_end = tl.minimum(row_begin + rows_per_program, rows)
    amax = tl.zeros((ROWS, COLUMNS), tl.float32)
    for row in range(row_begin, row_end, ROWS):
        r = row + tl.arange(0, ROWS)
        mask = (r[:, None] < row_end) & (c[None, :] < columns)
        values = tl.load(qdata + r[:, None].to(tl.int64) * qdata_stride + c[None, :], mask=mask, other=0.0)
        factor = tl.load(factors + r, mask=r < row_end, other=0.0)
        amax = nan_max(amax, tl.abs(from_e4m3(values) * factor[:, None]))
    tl.atomic_max(amax_bits + c, nan_amax(amax, 0).to(tl.int32, bitcast=True), mask=c < columns, sem="relaxed")


@triton.jit
def _load_bytes(ptrs, mask, factors, r, rows, inverse, SCALED: tl.constexpr):
    """Load one row of each word (rescaled if SCALED) into the low byte."""
    if SCALED:
        factor = tl.load(factors + r, mask=r < rows, other=0.0)
        # In this order: the product of both factors alone may overflow float32 where the value is zero.
        values = from_e4m3(tl.load(ptrs, mask=mask, other=0.0)) * factor[:, None] * inverse[None, :]
        codes = to_e4m3(values).to(tl.uint8, bitcast=True)
    else:
        codes = tl.load(ptrs, mask=mask, other=0)
    return codes.to(tl.uint32)


@triton.jit
def _transpose(
    qdata, qdata_stride, factors, amax_bits, scales, out, out_vectors, rows, columns,
    SCALED: tl.constexpr, WORDS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`out` is in words; each of its rows has `out_vectors` vectors of 16 bytes."""
    r = (tl.program_id(0) * WORDS + tl.arange(0, WORDS)) * 4
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inverse = 0.0
    if SCALED:
        amax = tl.load(amax_bits + c, mask=c < columns, other=0).to(tl.float32, bitcast=True)
        scale = pow2_scale(amax, E4M3_MAX)
        tl.store(scales + c, scale, mask=(c < columns) & (tl.program_id(0) == 0))
        inverse = tl.where(scale == scale, 1.0 / scale, 0.0)  # keeps the padding zero for NaN scales
    ptrs = qdata + r[:, None].to(tl.int64) * qdata_stride + c[None, :]
    col_mask = c[None, :] < columns
    words = _load_bytes(ptrs, (r[:, None] < rows) & col_mask, factors, r, rows, inverse, SCALED)
    for i in tl.static_range(1, 4):
        mask = (r[:, None] + i < rows) & col_mask
        words |= _load_bytes(ptrs + i * qdata_stride, mask, factors, r + i, rows, inverse, SCALED) << (8 * i)
    w = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    to = out + c[:, None].to(tl.int64) * (out_vectors * 4) + w[None, :]
    tl.store(to, tl.trans(words), mask=(c[:, None] < columns) & (w[None, :] < out_vectors * 4))


def is_aligned(qdata: Tensor) -> bool:
    """Whether the kernels can read these rows."""
    sizes = (qdata.shape[1], qdata.stride(0), qdata.data_ptr())
    return qdata.stride(1) == 1 and all(size % ALIGNMENT == 0 for size in sizes)


def transpose(qdata: Tensor, factors: Tensor | None, out: Tensor, scales: Tensor | None) -> None:
    rows, columns = qdata.shape
    amax_bits = None
    if factors is not None:
        amax_bits = torch.zeros(columns, dtype=torch.int32, device=qdata.device)
        column_programs = ceil_div(columns, _AMAX_COLUMNS)
        rows_per_program = ceil_div(ceil_div(rows, max(1, _AMAX_PROGRAMS // column_programs)), _AMAX_ROWS) * _AMAX_ROWS
        launch(
            _column_amax, (column_programs, ceil_div(rows, rows_per_program)),
            qdata, qdata.stride(0), factors, amax_bits, rows, columns, rows_per_program,
            ROWS=_AMAX_ROWS, COLUMNS=_AMAX_COLUMNS,
        )  # fmt: skip
    launch(
        _transpose, (ceil_div(rows, 4 * _WORDS), ceil_div(columns, _COLUMNS)),
        qdata if factors is not None else qdata.view(torch.uint8), qdata.stride(0), factors, amax_bits, scales,
        out.view(torch.uint32), out.shape[1] // 16, rows, columns,
        SCALED=factors is not None, WORDS=_WORDS, COLUMNS=_COLUMNS,
    )  # fmt: skip
