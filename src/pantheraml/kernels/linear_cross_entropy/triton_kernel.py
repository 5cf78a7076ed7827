"""Softmax, its scores and its gradient in two passes over the logits of a token; the second finds them in the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels import e4m3
from pantheraml.kernels.triton_support import SMALLEST_SCALE, block_of, launch, row_warps

_BLOCK = 8192
_LARGEST = tl.constexpr(e4m3.LARGEST_E5M2)


@triton.jit
def _to_e5m2(values):
    """The bytes of float32 values, none larger than e5m2's largest: the upper half of float16, rounded to even."""
    half = values.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    rounded = (half + 0x7F + ((half >> 8) & 1)) >> 8
    # a NaN's bits would run over into a zero
    return tl.where(values == values, rounded, 0x7E).to(tl.uint8)


@triton.jit
def _softmax(
    logits, labels, gradient, scales, losses, entropies, hits, columns,
    DETAILS: tl.constexpr, GRADIENT: tl.constexpr, QUANTISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    label = tl.load(labels + row)
    counted = label >= 0
    largest = -float("inf")
    largest_other = -float("inf")
    total = 0.0
    weighed = 0.0
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = tl.load(logits + at, mask=at < columns, other=-float("inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(z, 0))
        shrink = tl.exp(largest - new)
        p = tl.exp(z - new)
        total = total * shrink + tl.sum(p, 0)
        largest = new
        if DETAILS:
            weighed = weighed * shrink + tl.sum(p * tl.where(p > 0, z, 0.0), 0)
        if QUANTISE:
            largest_other = tl.maximum(largest_other, tl.max(tl.where(at == label, -float("inf"), z), 0))
    log_z = largest + tl.log(total)
    # A label beyond the vocabulary must not read a neighbour's logit: its loss is NaN.
    target = tl.load(logits + label, mask=counted & (label < columns), other=float("nan")).to(tl.float32)
    loss = log_z - target
    tl.store(losses + row, tl.where(counted, loss, 0.0))
    if DETAILS:
        tl.store(entropies + row, tl.where(counted, log_z - weighed / total, 0.0))
        tl.store(hits + row, (counted & (target >= largest)).to(tl.uint8))
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
                scaled = tl.minimum(tl.maximum(d * inverse, -_LARGEST), _LARGEST)
                # minimum and maximum may drop a NaN
                tl.store(gradient + at, _to_e5m2(tl.where(d == d, scaled, d)), mask=at < columns)
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
    block = min(_BLOCK, block_of(columns))
    if scales is not None:
        assert gradient is not None
        gradient = gradient.view(torch.uint8)
    entropies, hits = (None, None) if details is None else (details[0], details[1].view(torch.uint8))
    launch(
        _softmax, (rows,), logits, labels, gradient, scales, losses, entropies, hits, columns,
        DETAILS=details is not None, GRADIENT=gradient is not None, QUANTISE=scales is not None, BLOCK=block,
        num_warps=row_warps(block),
    )  # fmt: skip
