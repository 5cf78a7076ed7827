"""One program a row: the row stays in registers from the load to the last store.

All loads come before the first sum over the row: warps wait for each other there, and what is loaded after it is
waited for once more.

The gradient of the weight goes by columns instead: one program sums a share of the rows of some columns, and another
kernel the shares, always in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.triton_support import (
    SMALLEST_SCALE,
    block_of,
    ceil_div,
    largest,
    launch,
    row_scale,
    row_warps,
    to_e4m3,
)

_SUM_ROWS, _SUM_COLUMNS, _SUM_PROGRAMS = 16, 128, 1056  # eight programs for each of an H200's processors
_MOST_SHARES = 64


@triton.jit
def _norm_forward(
    x, delta, total, weight, out, out_stride, scales, inverses, columns, epsilon,
    ADD: tl.constexpr, QUANTISE: tl.constexpr, PLUS_ONE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < columns
    dtype = x.dtype.element_ty
    values = tl.load(x + row * columns + at, mask=live, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(delta + row * columns + at, mask=live, other=0.0).to(tl.float32)
        kept = values.to(dtype)
        tl.store(total + row * columns + at, kept, mask=live)
        values = kept.to(tl.float32)
    gain = tl.load(weight + at, mask=live, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 0) / columns + epsilon)
    tl.store(inverses + row, inverse)
    if PLUS_ONE:
        normal = (values * inverse * (1.0 + gain)).to(dtype).to(tl.float32)
    else:
        normal = ((values * inverse).to(dtype).to(tl.float32) * gain).to(dtype).to(tl.float32)
    if QUANTISE:
        scale = row_scale(largest(tl.abs(normal), 0))
        tl.store(scales + row, scale)
        tl.store(out + row * out_stride + at, to_e4m3(normal * (1.0 / scale)), mask=live)
    else:
        tl.store(out + row * out_stride + at, normal.to(dtype), mask=live)


@triton.jit
def _norm_backward(
    g, x, x_stride, x_scales, weight, inverses, residual, out, multiplier, payload, payload_stride, scales, columns,
    RESULT: tl.constexpr, ADD: tl.constexpr, PLUS_ONE: tl.constexpr, ROWS: tl.constexpr, SCALED: tl.constexpr,
    QUANTISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """RESULT: x holds what the way forward gave, in e4m3, and not what it took."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < columns
    place = row * columns + at
    inverse = tl.load(inverses + row)
    unit = inverse
    if RESULT:
        unit = tl.load(x_scales + row)
    gain = tl.load(weight + at, mask=live, other=0.0).to(tl.float32)
    if PLUS_ONE:
        gain += 1.0
    incoming = tl.load(g + place, mask=live, other=0.0).to(tl.float32)
    other = incoming
    if ADD:
        other = tl.load(residual + place, mask=live, other=0.0)
    factor = incoming
    if SCALED:
        factor = tl.load(multiplier + at, mask=live, other=0.0)
    # last: e4m3 is loaded by other threads than use it, who wait for each other here too
    given = tl.load(x + row * x_stride + at, mask=live, other=0.0).to(tl.float32) * unit
    scaled = incoming * gain
    if RESULT:
        mean = tl.sum(incoming * given, 0) / columns
        normal = given / tl.where(tl.abs(gain) < SMALLEST_SCALE, 1.0, gain)
    else:
        mean = tl.sum(scaled * given, 0) / columns
        normal = given
    dx = inverse * (scaled - normal * mean)
    if ADD:
        dx += other.to(tl.float32)
    rounded = dx.to(out.dtype.element_ty)
    tl.store(out + place, rounded, mask=live)
    if ROWS:
        values = rounded.to(tl.float32)
        if SCALED:
            values *= factor
        payload += row * payload_stride
        if QUANTISE:
            scale = row_scale(largest(tl.abs(values), 0))
            tl.store(scales + row, scale)
            tl.store(payload + at, to_e4m3(values * (1.0 / scale)), mask=live)
        else:
            tl.store(payload + at, values.to(payload.dtype.element_ty), mask=live)


@triton.jit
def _weight_sums(g, x, inverses, sums, rows, columns, share, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, rows)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(begin, end, ROWS):
        r = first + tl.arange(0, ROWS)
        live = (r[:, None] < end) & (c[None, :] < columns)
        at = r[:, None].to(tl.int64) * columns + c[None, :]
        inverse = tl.load(inverses + r, mask=r < end, other=0.0)
        normal = tl.load(x + at, mask=live, other=0.0).to(tl.float32) * inverse[:, None]
        total += tl.load(g + at, mask=live, other=0.0).to(tl.float32) * normal
    tl.store(sums + tl.program_id(1) * columns + c, tl.sum(total, 0), mask=c < columns)


@triton.jit
def _sum_shares(sums, out, shares, columns, SHARES: tl.constexpr, COLUMNS: tl.constexpr):
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    s = tl.arange(0, SHARES)
    live = (s[:, None] < shares) & (c[None, :] < columns)
    total = tl.sum(tl.load(sums + s[:, None] * columns + c[None, :], mask=live, other=0.0), 0)
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
        ADD=delta is not None, QUANTISE=scales is not None, PLUS_ONE=plus_one, BLOCK=block, num_warps=row_warps(block),
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
    payload: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:
    rows, columns = g.shape
    block = block_of(columns)
    launch(
        _norm_backward, (rows,),
        g, x, x.stride(0), x_scales, weight, inverses, residual, out,
        multiplier, payload, 0 if payload is None else payload.stride(0), scales, columns,
        RESULT=x_scales is not None, ADD=residual is not None, PLUS_ONE=plus_one, ROWS=payload is not None,
        SCALED=multiplier is not None, QUANTISE=scales is not None, BLOCK=block, num_warps=row_warps(block),
    )  # fmt: skip


def weight_gradient(g: Tensor, x: Tensor, inverses: Tensor, out: Tensor) -> None:
    rows, columns = g.shape
    across = ceil_div(columns, _SUM_COLUMNS)
    wanted = max(1, min(_MOST_SHARES, _SUM_PROGRAMS // across))
    share = ceil_div(ceil_div(rows, wanted), _SUM_ROWS) * _SUM_ROWS
    shares = ceil_div(rows, share)
    sums = torch.empty(shares, columns, dtype=torch.float32, device=g.device)
    launch(
        _weight_sums, (across, shares),
        g, x, inverses, sums, rows, columns, share, ROWS=_SUM_ROWS, COLUMNS=_SUM_COLUMNS,
    )  # fmt: skip
    launch(_sum_shares, (across,), sums, out, shares, columns, SHARES=block_of(shares), COLUMNS=_SUM_COLUMNS)
