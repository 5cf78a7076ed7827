"""Softmax, its scores and its gradient in two passes over the logits of a token; the second finds them in the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels import e4m3
from pantheraml.kernels.triton_support import INTERPRETED, SMALLEST_SCALE, block_of, ceil_div, launch

_BLOCK, _BLOCK_QUANTISED, _WARPS = 4096, 8192, 16  # the fastest on an H200 for a vocabulary of 128,256
_SCALED_AT_ONCE = 2048
_LARGEST = tl.constexpr(e4m3.LARGEST_E5M2)


@triton.jit
def _to_e5m2(values):
    """Float32 to e5m2 by way of float16, round to nearest even; beyond the range its end, and NaN stays NaN."""
    inside = tl.minimum(tl.maximum(values, -_LARGEST), _LARGEST)  # may drop a NaN
    half = tl.where(values == values, inside, values).to(tl.float16)
    if INTERPRETED:
        # The interpreter's cast cuts off. What it gets is the upper half of float16, rounded; a NaN's bits would run
        # over into a zero.
        bits = half.to(tl.uint16, bitcast=True).to(tl.uint32)
        rounded = (bits + 0x7F + ((bits >> 8) & 1)) >> 8
        return tl.where(values == values, rounded, 0x7E).to(tl.uint8).to(tl.float8e5, bitcast=True)
    return half.to(tl.float8e5)


@triton.jit
def _softmax(
    logits, labels, gradient, scales, losses, entropies, hits, columns,
    DETAILS: tl.constexpr, GRADIENT: tl.constexpr, QUANTISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each lane keeps the sums of the columns that it reads; lanes are brought together once, after the last block."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    label = tl.load(labels + row)
    counted = label >= 0
    # A label beyond the vocabulary must not read a neighbour's logit: its loss is NaN.
    target = tl.load(logits + label, mask=counted & (label < columns), other=float("nan")).to(tl.float32)
    # Not minus infinity: its difference to itself is NaN.
    largest = tl.full((BLOCK,), -3e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighed = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = tl.load(logits + at, mask=at < columns, other=-float("inf")).to(tl.float32)
        z = tl.where(at == label, -float("inf"), z)  # the label comes last: the others' largest is wanted too
        # of exp(largest - new) and exp(z - new) one is 1
        e = tl.exp(-tl.abs(z - largest))
        grows = z > largest
        p = tl.where(grows, 1.0, e)
        shrink = tl.where(grows, e, 1.0)
        total = total * shrink + p
        if DETAILS:
            weighed = weighed * shrink + p * tl.where(p > 0, z, 0.0)
        largest = tl.where(grows, z, largest)
    largest_other = tl.max(largest, 0)
    top = tl.maximum(largest_other, tl.where(counted, target, -3e38))
    to_top = tl.exp(largest - top)
    p_target = tl.where(counted, tl.exp(target - top), 0.0)
    whole = tl.sum(total * to_top, 0) + p_target
    log_z = top + tl.log(whole)
    loss = log_z - target
    tl.store(losses + row, tl.where(counted, loss, 0.0))
    if DETAILS:
        mean = (tl.sum(weighed * to_top, 0) + p_target * tl.where(p_target > 0, target, 0.0)) / whole
        tl.store(entropies + row, tl.where(counted, log_z - mean, 0.0))
        tl.store(hits + row, (counted & (target >= largest_other)).to(tl.uint8))
    if GRADIENT:
        gradient += row * columns
        inverse = 1.0
        if QUANTISE:
            found = tl.maximum(tl.exp(largest_other - log_z), 1.0 - tl.exp(-loss))
            scale = tl.maximum(tl.where(counted, found, 0.0) / _LARGEST, SMALLEST_SCALE)
            tl.store(scales + row, scale)
            inverse = 1.0 / scale
        for start in range(0, columns, BLOCK):
            at = start + tl.arange(0, BLOCK)
            z = tl.load(logits + at, mask=at < columns, other=-float("inf")).to(tl.float32)
            d = tl.where(counted, tl.exp(z - log_z) - tl.where(at == label, 1.0, 0.0), 0.0)
            if QUANTISE:
                tl.store(gradient + at, _to_e5m2(d * inverse), mask=at < columns)
            else:
                tl.store(gradient + at, d.to(gradient.dtype.element_ty), mask=at < columns)


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
    block = min(_BLOCK if scales is None else _BLOCK_QUANTISED, block_of(columns))
    entropies, hits = (None, None) if details is None else (details[0], details[1].view(torch.uint8))
    launch(
        _softmax, (rows,), logits, labels, gradient, scales, losses, entropies, hits, columns,
        DETAILS=details is not None, GRADIENT=gradient is not None, QUANTISE=scales is not None, BLOCK=block,
        num_warps=min(_WARPS, max(1, block // 256)),
    )  # fmt: skip


@triton.jit
def _scale(x, factor, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32) * tl.load(factor)
    tl.store(out + at, values.to(out.dtype.element_ty), mask=at < count)


def scale(x: Tensor, factor: Tensor, out: Tensor) -> None:
    """`x`, whose values lie end to end, times one float32 number on the GPU."""
    count = x.numel()
    if count:
        launch(_scale, (ceil_div(count, _SCALED_AT_ONCE),), x, factor, out, count, BLOCK=_SCALED_AT_ONCE)
