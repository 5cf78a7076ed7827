"""RMSNorm per head with RoPE: one program per eight heads of a token; backward: one program per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.head_norm_rope.op import HeadNorms
from pantheraml.kernels.triton_support import (
    MIN_SCALE,
    block_of,
    ceil_div,
    launch,
    nan_amax,
    nan_max,
    row_scale,
    to_e4m3,
)

_HEADS = 8
"""Heads per program of two warps: 16 bytes per thread for each half."""
_VALUES = 1536
"""Values per warp in backward: 48 registers per thread for the row, and as many for the heads it is computed from."""


@triton.jit
def _gained(values, inverse, gain, PLUS_ONE: tl.constexpr, DTYPE: tl.constexpr):
    """Multiply by the inverse RMS and the gain, rounding where the modules of transformers do."""
    if PLUS_ONE:
        return (values * inverse * (1.0 + gain)).to(DTYPE).to(tl.float32)
    return ((values * inverse).to(DTYPE).to(tl.float32) * gain).to(DTYPE).to(tl.float32)


@triton.jit
def _norm_rope_heads(
    source, token_stride, head_stride, out, out_stride, inverses, weight, first, heads, token, cos, sin, epsilon,
    NORMED: tl.constexpr, PLUS_ONE: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Process HEADS of a token's `heads` heads, starting at `first`. Without NORMED they are copied."""
    heads_of_block = first + tl.arange(0, HEADS)
    head = heads_of_block[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (head < heads) & (cols < HALF)
    ptrs = source + token * token_stride + head * head_stride + cols
    to = out + token * out_stride + head * 2 * HALF + cols
    low = tl.load(ptrs, mask=mask, other=0.0)
    high = tl.load(ptrs + HALF, mask=mask, other=0.0)
    if NORMED:
        c = tl.load(cos + token * 2 * HALF + cols, mask=mask, other=1.0).to(tl.float32)
        s = tl.load(sin + token * 2 * HALF + cols, mask=mask, other=0.0).to(tl.float32)
        low_gain = tl.load(weight + cols, mask=cols < HALF, other=0.0).to(tl.float32)
        high_gain = tl.load(weight + HALF + cols, mask=cols < HALF, other=0.0).to(tl.float32)
        dtype: tl.constexpr = source.dtype.element_ty
        a, b = low.to(tl.float32), high.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(a * a + b * b, 1) / (2 * HALF) + epsilon)
        tl.store(inverses + heads_of_block, inverse, mask=heads_of_block < heads)
        a = _gained(a, inverse[:, None], low_gain, PLUS_ONE, dtype)
        b = _gained(b, inverse[:, None], high_gain, PLUS_ONE, dtype)
        low, high = a * c - b * s, b * c + a * s
    tl.store(to, low.to(out.dtype.element_ty), mask=mask)
    tl.store(to + HALF, high.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _norm_rope(
    q, q_token, q_head, k, k_token, k_head, v, v_token, v_head,
    q_out, q_stride, k_out, k_stride, v_out, v_stride, inverses, q_weight, k_weight, queries, keys, cos, sin, epsilon,
    PLUS_ONE: tl.constexpr, QUERY_BLOCKS: tl.constexpr, KEY_BLOCKS: tl.constexpr, VALUE_BLOCKS: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Process one block of a token's heads: norm and RoPE for query and key heads, a copy for value heads."""
    blocks: tl.constexpr = QUERY_BLOCKS + KEY_BLOCKS + VALUE_BLOCKS
    token = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    inverses += token * (queries + keys)
    if block < QUERY_BLOCKS:
        _norm_rope_heads(
            q, q_token, q_head, q_out, q_stride, inverses, q_weight, block * HEADS, queries, token, cos, sin, epsilon,
            True, PLUS_ONE, HEADS, HALF, BLOCK,
        )  # fmt: skip
    elif block < QUERY_BLOCKS + KEY_BLOCKS:
        _norm_rope_heads(
            k, k_token, k_head, k_out, k_stride, inverses + queries, k_weight, (block - QUERY_BLOCKS) * HEADS, keys,
            token, cos, sin, epsilon, True, PLUS_ONE, HEADS, HALF, BLOCK,
        )  # fmt: skip
    else:
        _norm_rope_heads(
            v, v_token, v_head, v_out, v_stride, inverses, k_weight, (block - QUERY_BLOCKS - KEY_BLOCKS) * HEADS, keys,
            token, cos, sin, epsilon, False, PLUS_ONE, HEADS, HALF, BLOCK,
        )  # fmt: skip


def forward(
    sources: Sequence[Tensor], outs: Sequence[Tensor], inverse: Tensor, norms: HeadNorms, cos: Tensor, sin: Tensor
) -> None:
    """Normalize and rotate query and key of `sources` into `outs`, each [tokens, heads, size].

    Sources are contiguous in the last dimension, outs in the last two. An out may be its source; values are then not
    touched.
    """
    tokens, queries, size = sources[0].shape
    keys = sources[1].shape[1]
    heads = min(_HEADS, block_of(queries))
    value_blocks = 0 if outs[2] is sources[2] else ceil_div(keys, heads)
    blocks = ceil_div(queries, heads), ceil_div(keys, heads), value_blocks
    launch(
        _norm_rope, (tokens * sum(blocks),),
        *[argument for source in sources for argument in (source, source.stride(0), source.stride(1))],
        *[argument for out in outs for argument in (out, out.stride(0))],
        inverse, norms.query, norms.key, queries, keys, cos, sin, norms.epsilon,
        PLUS_ONE=norms.plus_one, QUERY_BLOCKS=blocks[0], KEY_BLOCKS=blocks[1], VALUE_BLOCKS=blocks[2], HEADS=heads,
        HALF=size // 2, BLOCK=block_of(size // 2), num_warps=2,
    )  # fmt: skip


@triton.jit
def _heads_gradient(
    part, token_stride, head_stride, saved, saved_token, saved_head, inverses, weight, sums, heads, c, s,
    KEPT_INPUT: tl.constexpr, PLUS_ONE: tl.constexpr, SUMS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Load the gradient of a token's heads, undo RoPE, and return both halves of the gradient before the norm."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (head[:, None] < heads) & (cols < HALF)
    ptrs = part + token * token_stride + head[:, None] * head_stride + cols
    saved_ptrs = saved + token * saved_token + head[:, None] * saved_head + cols
    low = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
    a = tl.load(saved_ptrs, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(saved_ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.load(inverses + head, mask=head < heads, other=0.0)[:, None]
    low_gain = tl.load(weight + cols, mask=cols < HALF, other=0.0).to(tl.float32)
    high_gain = tl.load(weight + HALF + cols, mask=cols < HALF, other=0.0).to(tl.float32)
    if PLUS_ONE:
        low_gain += 1.0
        high_gain += 1.0
    low, high = low * c + high * s, high * c - low * s
    if KEPT_INPUT:
        a *= inverse
        b *= inverse
    else:  # the table is rounded, and may be scaled: its inverse is not its transpose
        scale = 1.0 / (c * c + s * s)
        a, b = (a * c + b * s) * scale, (b * c - a * s) * scale
        a /= tl.where(tl.abs(low_gain) < MIN_SCALE, 1.0, low_gain)
        b /= tl.where(tl.abs(high_gain) < MIN_SCALE, 1.0, high_gain)
    if SUMS:
        to = sums + token * 4 * HALF + tl.arange(0, BLOCK)
        tl.store(to, tl.sum(low * a, 0), mask=tl.arange(0, BLOCK) < HALF)
        tl.store(to + HALF, tl.sum(high * b, 0), mask=tl.arange(0, BLOCK) < HALF)
    low *= low_gain
    high *= high_gain
    mean = (tl.sum(low * a + high * b, 1) / (2 * HALF))[:, None]
    return inverse * (low - a * mean), inverse * (high - b * mean)


@triton.jit
def _scaled_heads(
    low, high, multiplier, heads,
    SCALED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Multiply by the columns' multiplier, and return the amax as well."""
    if SCALED:
        head = tl.arange(0, HEADS)[:, None]
        cols = tl.arange(0, BLOCK)[None, :]
        mask = (head < heads) & (cols < HALF)
        ptrs = multiplier + head * 2 * HALF + cols
        low *= tl.load(ptrs, mask=mask, other=0.0)
        high *= tl.load(ptrs + HALF, mask=mask, other=0.0)
    return low, high, nan_amax(nan_amax(nan_max(tl.abs(low), tl.abs(high)), 1), 0)


@triton.jit
def _store_heads(
    out, low, high, inverse, heads,
    QUANTIZE: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, HEADS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (head < heads) & (cols < HALF)
    to = out + head * 2 * HALF + cols
    if QUANTIZE:
        tl.store(to, to_e4m3(low * inverse), mask=mask)
        tl.store(to + HALF, to_e4m3(high * inverse), mask=mask)
    else:
        tl.store(to, low.to(out.dtype.element_ty), mask=mask)
        tl.store(to + HALF, high.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _norm_rope_backward(
    q, q_token, q_head, k, k_token, k_head, v, v_token, v_head, q_saved, q_saved_token, q_saved_head,
    k_saved, k_saved_token, k_saved_head, inverses, q_weight, k_weight, queries, keys, cos, sin,
    multiplier, out, out_stride, scales, sums,
    KEPT_QUERY: tl.constexpr, KEPT_KEY: tl.constexpr, PLUS_ONE: tl.constexpr, SUMS: tl.constexpr,
    SCALED: tl.constexpr, QUANTIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradient of a token's merged query, key and value, as one row."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)[None, :]
    c = tl.load(cos + token * 2 * HALF + cols, mask=cols < HALF, other=1.0).to(tl.float32)
    s = tl.load(sin + token * 2 * HALF + cols, mask=cols < HALF, other=0.0).to(tl.float32)
    inverses += token * (queries + keys)
    k_start = queries * 2 * HALF
    v_start = k_start + keys * 2 * HALF
    v_head_index = tl.arange(0, KEYS)[:, None]
    v_mask = (v_head_index < keys) & (cols < HALF)
    v_ptrs = v + token * v_token + v_head_index * v_head + cols
    v_low = tl.load(v_ptrs, mask=v_mask, other=0.0).to(tl.float32)
    v_high = tl.load(v_ptrs + HALF, mask=v_mask, other=0.0).to(tl.float32)
    q_low, q_high = _heads_gradient(
        q, q_token, q_head, q_saved, q_saved_token, q_saved_head, inverses, q_weight, sums, queries, c, s,
        KEPT_QUERY, PLUS_ONE, SUMS, QUERIES, HALF, BLOCK,
    )  # fmt: skip
    k_low, k_high = _heads_gradient(
        k, k_token, k_head, k_saved, k_saved_token, k_saved_head, inverses + queries, k_weight, sums + 2 * HALF, keys,
        c, s, KEPT_KEY, PLUS_ONE, SUMS, KEYS, HALF, BLOCK,
    )  # fmt: skip
    out += token * out_stride
    inverse = 1.0
    if QUANTIZE:
        q_low, q_high, q_amax = _scaled_heads(q_low, q_high, multiplier, queries, SCALED, QUERIES, HALF, BLOCK)
        k_low, k_high, k_amax = _scaled_heads(k_low, k_high, multiplier + k_start, keys, SCALED, KEYS, HALF, BLOCK)
        v_low, v_high, v_amax = _scaled_heads(v_low, v_high, multiplier + v_start, keys, SCALED, KEYS, HALF, BLOCK)
        scale = row_scale(nan_max(q_amax, nan_max(k_amax, v_amax)))
        tl.store(scales + token, scale)
        inverse = 1.0 / scale
    _store_heads(out, q_low, q_high, inverse, queries, QUANTIZE, QUERIES, HALF, BLOCK)
    _store_heads(out + k_start, k_low, k_high, inverse, keys, QUANTIZE, KEYS, HALF, BLOCK)
    _store_heads(out + v_start, v_low, v_high, inverse, keys, QUANTIZE, KEYS, HALF, BLOCK)


class GradientRows(NamedTuple):
    """Where backward writes, and what the rows are multiplied by."""

    rows: Tensor
    multiplier: Tensor | None
    scales: Tensor | None
    """With scales, rows are e4m3."""
    sums: Tensor | None
    """Each token's share of the weights' gradients [tokens, 2, size]."""


def backward(
    parts: Sequence[Tensor],
    saved: tuple[Tensor, Tensor],
    inverse: Tensor,
    norms: HeadNorms,
    cos: Tensor,
    sin: Tensor,
    kept_input: tuple[bool, bool],
    to: GradientRows,
) -> None:
    """Write the gradient of the merged matrix from `parts` [tokens, heads, size], contiguous in the last dimension."""
    tokens, queries, size = parts[0].shape
    keys = parts[1].shape[1]
    strided = [argument for part in (*parts, *saved) for argument in (part, part.stride(0), part.stride(1))]
    blocks = block_of(queries), block_of(keys), block_of(size // 2)
    values = (blocks[0] + 2 * blocks[1]) * 2 * blocks[2]
    unused = inverse  # any pointer: the kernel adds offsets to it, but does not read it
    launch(
        _norm_rope_backward, (tokens,),
        *strided, inverse, norms.query, norms.key, queries, keys, cos, sin,
        unused if to.multiplier is None else to.multiplier, to.rows, to.rows.stride(0),
        unused if to.scales is None else to.scales, unused if to.sums is None else to.sums,
        KEPT_QUERY=kept_input[0], KEPT_KEY=kept_input[1], PLUS_ONE=norms.plus_one, SUMS=to.sums is not None,
        SCALED=to.multiplier is not None, QUANTIZE=to.scales is not None, QUERIES=blocks[0], KEYS=blocks[1],
        HALF=size // 2, BLOCK=blocks[2], num_warps=min(16, block_of(ceil_div(values, _VALUES))),
    )  # fmt: skip
