"""RMSNorm with one program per row, which stays in registers from load to store.

All loads are issued before the first reduction over the row: warps synchronize there, and later loads would stall once
more.

The weight gradient is reduced over rows instead: each program sums a range of rows for a block of columns, and a second
kernel adds the partial sums, always in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.triton_support import (
    MIN_SCALE,
    block_of,
    ceil_div,
    launch,
    nan_amax,
    row_scale,
    row_warps,
    to_e4m3,
)

_SUM_ROWS, _SUM_COLUMNS, _SUM_PROGRAMS = 16, 128, 1056  # eight programs per SM of an H200
_MAX_PARTIALS = 64


@triton.jit
def _norm_forward(
    x, delta, total, weight, out, out_stride, scales, inverses, columns, epsilon,
    ADD: tl.constexpr, QUANTIZE: tl.constexpr, PLUS_ONE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < columns
    dtype = x.dtype.element_ty
    values = tl.load(x + row * columns + cols, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(delta + row * columns + cols, mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(dtype)
        tl.store(total + row * columns + cols, rounded, mask=mask)
        values = rounded.to(tl.float32)
    gain = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 0) / columns + epsilon)
    tl.store(inverses + row, inverse)
    if PLUS_ONE:
        normal = (values * inverse * (1.0 + gain)).to(dtype).to(tl.float32)
    else:
        normal = ((values * inverse).to(dtype).to(tl.float32) * gain).to(dtype).to(tl.float32)
    if QUANTIZE:
        scale = row_scale(nan_amax(tl.abs(normal), 0))
        tl.store(scales + row, scale)
        tl.store(out + row * out_stride + cols, to_e4m3(normal * (1.0 / scale)), mask=mask)
    else:
        tl.store(out + row * out_stride + cols, normal.to(dtype), mask=mask)


@triton.jit
def _norm_backward(
    g, x, x_stride, x_scales, weight, inverses, residual, out, multiplier, qdata, qdata_stride, scales, columns,
    FROM_OUTPUT: tl.constexpr, ADD: tl.constexpr, PLUS_ONE: tl.constexpr, ROWS: tl.constexpr, SCALED: tl.constexpr,
    QUANTIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """FROM_OUTPUT: x is the e4m3 output of the forward pass instead of its input."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < columns
    offsets = row * columns + cols
    inverse = tl.load(inverses + row)
    saved_scale = inverse
    if FROM_OUTPUT:
        saved_scale = tl.load(x_scales + row)
    gain = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    if PLUS_ONE:
        gain += 1.0
    grad = tl.load(g + offsets, mask=mask, other=0.0).to(tl.float32)
    residual_grad = grad
    if ADD:
        residual_grad = tl.load(residual + offsets, mask=mask, other=0.0)
    factor = grad
    if SCALED:
        factor = tl.load(multiplier + cols, mask=mask, other=0.0)
    # loaded last: e4m3 values are exchanged between threads, which synchronizes them here too
    saved = tl.load(x + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32) * saved_scale
    scaled = grad * gain
    if FROM_OUTPUT:
        mean = tl.sum(grad * saved, 0) / columns
        normal = saved / tl.where(tl.abs(gain) < MIN_SCALE, 1.0, gain)
    else:
        mean = tl.sum(scaled * saved, 0) / columns
        normal = saved
    dx = inverse * (scaled - normal * mean)
    if ADD:
        dx += residual_grad.to(tl.float32)
    rounded = dx.to(out.dtype.element_ty)
    tl.store(out + offsets, rounded, mask=mask)
    if ROWS:
        values = rounded.to(tl.float32)
        if SCALED:
            values *= factor
        qdata += row * qdata_stride
        if QUANTIZE:
            scale = row_scale(nan_amax(tl.abs(values), 0))
            tl.store(scales + row, scale)
            tl.store(qdata + cols, to_e4m3(values * (1.0 / scale)), mask=mask)
        else:
            tl.store(qdata + cols, values.to(qdata.dtype.element_ty), mask=mask)


@triton.jit
def _weight_partial_sums(
    g, x, inverses, sums, rows, columns, rows_per_program, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row_begin = tl.program_id(1) * rows_per_program
    row_end = tl.minimum(row_begin + rows_per_program, rows)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for row in range(row_begin, row_end, ROWS):
        r = row + tl.arange(0, ROWS)
        mask = (r[:, None] < row_end) & (c[None, :] < columns)
        cols = r[:, None].to(tl.int64) * columns + c[None, :]
        inverse = tl.load(inverses + r, mask=r < row_end, other=0.0)
        normal = tl.load(x + cols, mask=mask, other=0.0).to(tl.float32) * inverse[:, None]
        total += tl.load(g + cols, mask=mask, other=0.0).to(tl.float32) * normal
    tl.store(sums + tl.program_id(1) * columns + c, tl.sum(total, 0), mask=c < columns)


@triton.jit
def _reduce_partial_sums(sums, out, partials, columns, PARTIALS: tl.constexpr, COLUMNS: tl.constexpr):
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    s = tl.arange(0, PARTIALS)
    mask = (s[:, None] < partials) & (c[None, :] < columns)
    total = tl.sum(tl.load(sums + s[:, None] * columns + c[None, :], mask=mask, other=0.0), 0)
    tl.store(out + c, total.to(out.dtype.element_ty), mask=c < columns)


def forward(
    x: Tensor,
    delta: Tensor | None,
    total: Tensor | None,
    weight: Tensor,
    out: Tensor,
    scales: Tensor | None,
    inverses: Tensor,
    epsilon: float,
    plus_one: bool,
) -> None:
    rows, columns = x.shape
    block = block_of(columns)
    launch(
        _norm_forward, (rows,),
        x, delta, total, weight, out, out.stride(0), scales, inverses, columns, epsilon,
        ADD=delta is not None, QUANTIZE=scales is not None, PLUS_ONE=plus_one, BLOCK=block, num_warps=row_warps(block),
    )  # fmt: skip


def backward(
    g: Tensor,
    x: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    inverses: Tensor,
    residual: Tensor | None,
    out: Tensor,
    plus_one: bool,
    multiplier: Tensor | None = None,
    qdata: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:
    rows, columns = g.shape
    block = block_of(columns)
    launch(
        _norm_backward, (rows,),
        g, x, x.stride(0), x_scales, weight, inverses, residual, out,
        multiplier, qdata, 0 if qdata is None else qdata.stride(0), scales, columns,
        FROM_OUTPUT=x_scales is not None, ADD=residual is not None, PLUS_ONE=plus_one, ROWS=qdata is not None,
        SCALED=multiplier is not None, QUANTIZE=scales is not None, BLOCK=block, num_warps=row_warps(block),
    )  # fmt: skip


def weight_gradient(g: Tensor, x: Tensor, inverses: Tensor, out: Tensor) -> None:
    rows, columns = g.shape
    column_programs = ceil_div(columns, _SUM_COLUMNS)
    max_partials = max(1, min(_MAX_PARTIALS, _SUM_PROGRAMS // column_programs))
    rows_per_program = ceil_div(ceil_div(rows, max_partials), _SUM_ROWS) * _SUM_ROWS
    partials = ceil_div(rows, rows_per_program)
    sums = torch.empty(partials, columns, dtype=torch.float32, device=g.device)
    launch(
        _weight_partial_sums, (column_programs, partials),
        g, x, inverses, sums, rows, columns, rows_per_program, ROWS=_SUM_ROWS, COLUMNS=_SUM_COLUMNS,
    )  # fmt: skip
    launch(
        _reduce_partial_sums,
        (column_programs,),
        sums,
        out,
        partials,
        columns,
        PARTIALS=block_of(partials),
        COLUMNS=_SUM_COLUMNS,
    )
