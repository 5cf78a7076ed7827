"""One program a row: the row stays in registers from the load to the last store.

All loads come before the first sum over the row: warps wait for each other there, and what is loaded after it is
waited for once more.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.triton_support import block_of, largest, launch, row_scale, row_warps, to_e4m3


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
    g, x, weight, inverses, residual, out, columns,
    ADD: tl.constexpr, PLUS_ONE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < columns
    place = row * columns + at
    inverse = tl.load(inverses + row)
    normal = tl.load(x + place, mask=live, other=0.0).to(tl.float32) * inverse
    gain = tl.load(weight + at, mask=live, other=0.0).to(tl.float32)
    if PLUS_ONE:
        gain += 1.0
    scaled = tl.load(g + place, mask=live, other=0.0).to(tl.float32) * gain
    other = scaled
    if ADD:
        other = tl.load(residual + place, mask=live, other=0.0)
    dx = inverse * (scaled - normal * (tl.sum(scaled * normal, 0) / columns))
    if ADD:
        dx += other.to(tl.float32)
    tl.store(out + place, dx.to(out.dtype.element_ty), mask=live)


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
    g: Tensor, x: Tensor, weight: Tensor, inverses: Tensor, residual: Tensor | None, out: Tensor, plus_one: bool
) -> None:
    rows, columns = x.shape
    block = block_of(columns)
    launch(
        _norm_backward, (rows,),
        g, x, weight, inverses, residual, out, columns,
        ADD=residual is not None, PLUS_ONE=plus_one, BLOCK=block, num_warps=row_warps(block),
    )  # fmt: skip
