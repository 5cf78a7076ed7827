"""Softmax scores and gradient in two passes over each token's logits, the second of which reads from cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.fp8 import e4m3
from pantheraml.kernels.triton_support import INTERPRETED, MIN_SCALE, block_of, ceil_div, launch

_BLOCK, _WARPS = 8192, 16  # within 1 % of the fastest on an H200 for a vocabulary of 128,256
_LANE = 8
"""Columns per thread and load."""
_SCALE_BLOCK = 2048
_E5M2_MAX = tl.constexpr(e4m3.E5M2_MAX)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _to_e5m2(values):
    """Cast in-range float32 to e5m2: round to nearest even, propagate NaN."""
    if INTERPRETED:
        # The interpreter's cast truncates, so round the upper byte of float16. Rounding would carry a NaN's bits over
        # into zero.
        bits = values.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
        rounded = (bits + 0x7F + ((bits >> 8) & 1)) >> 8
        return tl.where(values == values, rounded, 0x7E).to(tl.uint8).to(tl.float8e5, bitcast=True)
    # Triton's cast goes through float16.
    return tl.inline_asm_elementwise(
        """{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1; cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
        mov.b32 $0, {low, high}; }""",
        "=r,f,f,f,f", [values], dtype=tl.float8e5, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def _softmax(
    logits, labels, gradient, scales, losses, entropies, hits, means, columns,
    DETAILS: tl.constexpr, GRADIENT: tl.constexpr, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """Online softmax: each group of LANE columns keeps its own maximum and sum, combined after the last block."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    label = tl.load(labels + row)
    has_target = label >= 0
    # A label beyond the vocabulary must not read another row's logit: its loss is NaN.
    target = tl.load(logits + label, mask=has_target & (label < columns), other=float("nan")).to(tl.float32)
    # Not -inf: -inf minus -inf is NaN.
    running_max = tl.full((BLOCK // LANE,), -1e38, tl.float32)
    total = tl.zeros((BLOCK // LANE,), tl.float32)
    weighted = tl.zeros((BLOCK // LANE,), tl.float32)
    plain_sum = tl.zeros((BLOCK // LANE,), tl.float32)
    for start in range(0, columns, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        z = tl.load(logits + cols, mask=cols < columns, other=-float("inf")).to(tl.float32)
        z = tl.reshape(z, (BLOCK // LANE, LANE))
        new_max = tl.maximum(running_max, tl.max(z, 1))
        correction = tl.exp2((running_max - new_max) * _LOG2E)
        p = tl.exp2((z - new_max[:, None]) * _LOG2E)
        total = total * correction + tl.sum(p, 1)
        if DETAILS:
            weighted = weighted * correction + tl.sum(p * tl.where(p == 0.0, 0.0, z), 1)
            plain_sum += tl.sum(tl.where(tl.reshape(cols, (BLOCK // LANE, LANE)) < columns, z, 0.0), 1)
        running_max = new_max
    row_max = tl.max(running_max, 0)
    to_max = tl.exp2((running_max - row_max) * _LOG2E)
    sum_exp = tl.sum(total * to_max, 0)
    log_z = row_max + tl.log(sum_exp) + tl.where(has_target, target - target, 0.0)
    loss = log_z - target
    tl.store(losses + row, tl.where(has_target, loss, 0.0))
    if DETAILS:
        tl.store(entropies + row, tl.where(has_target, log_z - tl.sum(weighted * to_max, 0) / sum_exp, 0.0))
        tl.store(means + row, tl.where(has_target, tl.sum(plain_sum, 0) / columns, 0.0))
        tl.store(hits + row, (has_target & (target >= row_max)).to(tl.uint8))
    if GRADIENT:
        gradient += row * columns
        log2_inv_scale = 0.0
        label_gradient = -1.0
        if QUANTIZE:
            amax = tl.maximum(tl.exp(row_max - log_z), 1.0 - tl.exp(-loss))
            scale = tl.maximum(tl.where(has_target, amax, 0.0) / _E5M2_MAX, MIN_SCALE)
            tl.store(scales + row, scale)
            log2_inv_scale = -tl.log2(scale)
            label_gradient = -1.0 / scale
        log_z = tl.where(has_target, log_z, 0.0)
        for start in range(0, columns, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            z = tl.load(logits + cols, mask=has_target & (cols < columns), other=-float("inf")).to(tl.float32)
            _store(gradient + cols, tl.exp2((z - log_z) * _LOG2E + log2_inv_scale), cols < columns, QUANTIZE)
        if has_target & (label < columns):
            tl.debug_barrier()  # all threads must have stored their columns before the label's is overwritten
            cols = tl.arange(0, LANE)
            d = tl.zeros((LANE,), tl.float32) + (tl.exp2((target - log_z) * _LOG2E + log2_inv_scale) + label_gradient)
            _store(gradient + label + cols, d, cols == 0, QUANTIZE)


@triton.jit
def _store(to, values, mask, QUANTIZE: tl.constexpr):
    if QUANTIZE:
        tl.store(to, _to_e5m2(values), mask=mask)
    else:
        tl.store(to, values.to(to.dtype.element_ty), mask=mask)


def softmax(
    logits: Tensor,
    labels: Tensor,
    losses: Tensor,
    details: tuple[Tensor, Tensor, Tensor] | None,
    gradient: Tensor | None,
    scales: Tensor | None,
) -> None:
    """`details` are entropies, top-1 hits and mean logits; `gradient` may be `logits`; with `scales` it is e5m2."""
    rows, columns = logits.shape
    block = max(_LANE, min(_BLOCK, block_of(columns)))
    entropies, hits, means = (None,) * 3 if details is None else (details[0], details[1].view(torch.uint8), details[2])
    launch(
        _softmax, (rows,), logits, labels, gradient, scales, losses, entropies, hits, means, columns,
        DETAILS=details is not None, GRADIENT=gradient is not None, QUANTIZE=scales is not None, BLOCK=block,
        LANE=_LANE, num_warps=min(_WARPS, max(1, block // 256)),
    )  # fmt: skip


@triton.jit
def _scale(x, factors, out, count, width, BY_ROW: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(factors + cols // width, mask=cols < count, other=0.0) if BY_ROW else tl.load(factors)
    values = tl.load(x + cols, mask=cols < count, other=0.0).to(tl.float32) * factor
    tl.store(out + cols, values.to(out.dtype.element_ty), mask=cols < count)


def scale(x: Tensor, factors: Tensor, out: Tensor) -> None:
    """Multiply contiguous `x` by a float32 scalar tensor, or by one factor per row."""
    count = x.numel()
    if count:
        launch(
            _scale, (ceil_div(count, _SCALE_BLOCK),), x, factors, out, count, x.shape[-1],
            BY_ROW=factors.numel() > 1, BLOCK=_SCALE_BLOCK,
        )  # fmt: skip
