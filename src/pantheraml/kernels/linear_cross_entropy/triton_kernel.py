"""Softmax, its scores and its gradient in two passes over the logits of a token; the second finds them in the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels import e4m3
from pantheraml.kernels.triton_support import INTERPRETED, SMALLEST_SCALE, block_of, ceil_div, launch

_BLOCK, _WARPS = 8192, 16  # within 1 % of the fastest on an H200 for a vocabulary of 128,256
_LANE = 8
"""Columns that one thread reads at once."""
_SCALED_AT_ONCE = 2048
_LARGEST = tl.constexpr(e4m3.LARGEST_E5M2)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _to_e5m2(values):
    """Float32 within the range to e5m2, round to nearest even; NaN stays NaN."""
    if INTERPRETED:
        # The interpreter's cast cuts off. What it gets is the upper half of float16, rounded; a NaN's bits would run
        # over into a zero.
        bits = values.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
        rounded = (bits + 0x7F + ((bits >> 8) & 1)) >> 8
        return tl.where(values == values, rounded, 0x7E).to(tl.uint8).to(tl.float8e5, bitcast=True)
    # Triton's own cast goes by way of float16.
    return tl.inline_asm_elementwise(
        """{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1; cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
        mov.b32 $0, {low, high}; }""",
        "=r,f,f,f,f", [values], dtype=tl.float8e5, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def _softmax(
    logits, labels, gradient, scales, losses, entropies, hits, columns,
    DETAILS: tl.constexpr, GRADIENT: tl.constexpr, QUANTISE: tl.constexpr, BLOCK: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """Every LANE columns side by side have sums of their own, relative to their largest; these are brought together
    once, after the last block."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    label = tl.load(labels + row)
    counted = label >= 0
    # A label beyond the vocabulary must not read a neighbour's logit: its loss is NaN.
    target = tl.load(logits + label, mask=counted & (label < columns), other=float("nan")).to(tl.float32)
    # Not minus infinity: its difference to itself is NaN.
    largest = tl.full((BLOCK // LANE,), -1e38, tl.float32)
    total = tl.zeros((BLOCK // LANE,), tl.float32)
    weighed = tl.zeros((BLOCK // LANE,), tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = tl.load(logits + at, mask=at < columns, other=-float("inf")).to(tl.float32)
        z = tl.reshape(z, (BLOCK // LANE, LANE))
        larger = tl.maximum(largest, tl.max(z, 1))
        shrink = tl.exp2((largest - larger) * _LOG2E)
        p = tl.exp2((z - larger[:, None]) * _LOG2E)
        total = total * shrink + tl.sum(p, 1)
        if DETAILS:
            weighed = weighed * shrink + tl.sum(p * tl.where(p == 0.0, 0.0, z), 1)
        largest = larger
    top = tl.max(largest, 0)
    to_top = tl.exp2((largest - top) * _LOG2E)
    whole = tl.sum(total * to_top, 0)
    log_z = top + tl.log(whole) + tl.where(counted, target - target, 0.0)
    loss = log_z - target
    tl.store(losses + row, tl.where(counted, loss, 0.0))
    if DETAILS:
        tl.store(entropies + row, tl.where(counted, log_z - tl.sum(weighed * to_top, 0) / whole, 0.0))
        tl.store(hits + row, (counted & (target >= top)).to(tl.uint8))
    if GRADIENT:
        gradient += row * columns
        shift = 0.0
        of_label = -1.0
        if QUANTISE:
            found = tl.maximum(tl.exp(top - log_z), 1.0 - tl.exp(-loss))
            scale = tl.maximum(tl.where(counted, found, 0.0) / _LARGEST, SMALLEST_SCALE)
            tl.store(scales + row, scale)
            shift = -tl.log2(scale)
            of_label = -1.0 / scale
        log_z = tl.where(counted, log_z, 0.0)
        for start in range(0, columns, BLOCK):
            at = start + tl.arange(0, BLOCK)
            z = tl.load(logits + at, mask=counted & (at < columns), other=-float("inf")).to(tl.float32)
            _put(gradient + at, tl.exp2((z - log_z) * _LOG2E + shift), at < columns, QUANTISE)
        if counted & (label < columns):
            tl.debug_barrier()  # only then has every thread written its columns, and the label's may be written over
            at = tl.arange(0, LANE)
            d = tl.zeros((LANE,), tl.float32) + (tl.exp2((target - log_z) * _LOG2E + shift) + of_label)
            _put(gradient + label + at, d, at == 0, QUANTISE)


@triton.jit
def _put(to, values, live, QUANTISE: tl.constexpr):
    if QUANTISE:
        tl.store(to, _to_e5m2(values), mask=live)
    else:
        tl.store(to, values.to(to.dtype.element_ty), mask=live)


def softmax(
    logits: Tensor,
    labels: Tensor,
    losses: Tensor,
    details: tuple[Tensor, Tensor] | None,
    gradient: Tensor | None,
    scales: Tensor | None,
) -> None:
    """`details` are entropies and hits; `gradient` may be `logits`; with `scales` it is e5m2."""
    rows, columns = logits.shape
    block = max(_LANE, min(_BLOCK, block_of(columns)))
    entropies, hits = (None, None) if details is None else (details[0], details[1].view(torch.uint8))
    launch(
        _softmax, (rows,), logits, labels, gradient, scales, losses, entropies, hits, columns,
        DETAILS=details is not None, GRADIENT=gradient is not None, QUANTISE=scales is not None, BLOCK=block,
        LANE=_LANE, num_warps=min(_WARPS, max(1, block // 256)),
    )  # fmt: skip


@triton.jit
def _scale(x, factors, out, count, width, BY_ROW: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(factors + at // width, mask=at < count, other=0.0) if BY_ROW else tl.load(factors)
    values = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32) * factor
    tl.store(out + at, values.to(out.dtype.element_ty), mask=at < count)


def scale(x: Tensor, factors: Tensor, out: Tensor) -> None:
    """`x`, whose values lie end to end, times one float32 number on the GPU, or one for each row."""
    count = x.numel()
    if count:
        launch(
            _scale, (ceil_div(count, _SCALED_AT_ONCE),), x, factors, out, count, x.shape[-1],
            BY_ROW=factors.numel() > 1, BLOCK=_SCALED_AT_ONCE,
        )  # fmt: skip
