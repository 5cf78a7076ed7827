"""RoPE: one program per eight heads of a token. RoPE backward with quantization: one program per token."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.triton_support import block_of, ceil_div, launch, nan_amax, nan_max, row_scale, to_e4m3

_HEADS = 8
"""Heads per program of two warps: 16 bytes per thread for each half."""
_VALUES = 3072
"""Values per warp: 96 registers per thread."""


@triton.jit
def _rope_heads(
    source, token_stride, head_stride, out, out_stride, first, heads, token, cos, sin,
    ROTATED: tl.constexpr, BACKWARD: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Process HEADS of a token's `heads` heads, starting at `first`."""
    head = first + tl.arange(0, HEADS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (head < heads) & (cols < HALF)
    ptrs = source + token * token_stride + head * head_stride + cols
    to = out + token * out_stride + head * 2 * HALF + cols
    low = tl.load(ptrs, mask=mask, other=0.0)
    high = tl.load(ptrs + HALF, mask=mask, other=0.0)
    if ROTATED:
        # Loaded for every head although identical: broadcasting one row would go through shared memory.
        c = tl.load(cos + token * 2 * HALF + cols, mask=mask, other=1.0).to(tl.float32)
        s = tl.load(sin + token * 2 * HALF + cols, mask=mask, other=0.0).to(tl.float32)
        if BACKWARD:
            s = -s
        a, b = low.to(tl.float32), high.to(tl.float32)
        low, high = a * c - b * s, b * c + a * s
    tl.store(to, low.to(out.dtype.element_ty), mask=mask)
    tl.store(to + HALF, high.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _rope(
    q, q_token, q_head, k, k_token, k_head, v, v_token, v_head,
    q_out, q_stride, k_out, k_stride, v_out, v_stride, queries, keys, cos, sin,
    BACKWARD: tl.constexpr, QUERY_BLOCKS: tl.constexpr, KEY_BLOCKS: tl.constexpr, VALUE_BLOCKS: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Process one block of a token's heads: RoPE for query and key heads, a copy for value heads."""
    blocks: tl.constexpr = QUERY_BLOCKS + KEY_BLOCKS + VALUE_BLOCKS
    token = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    if block < QUERY_BLOCKS:
        _rope_heads(
            q, q_token, q_head, q_out, q_stride, block * HEADS, queries, token, cos, sin,
            True, BACKWARD, HEADS, HALF, BLOCK,
        )  # fmt: skip
    elif block < QUERY_BLOCKS + KEY_BLOCKS:
        _rope_heads(
            k, k_token, k_head, k_out, k_stride, (block - QUERY_BLOCKS) * HEADS, keys, token, cos, sin,
            True, BACKWARD, HEADS, HALF, BLOCK,
        )  # fmt: skip
    else:
        _rope_heads(
            v, v_token, v_head, v_out, v_stride, (block - QUERY_BLOCKS - KEY_BLOCKS) * HEADS, keys, token, cos, sin,
            False, BACKWARD, HEADS, HALF, BLOCK,
        )  # fmt: skip


def rope(sources: Sequence[Tensor], outs: Sequence[Tensor], cos: Tensor, sin: Tensor, *, backward: bool) -> None:
    """Apply RoPE from query, key and value in `sources` to `outs`, each [tokens, heads, size].

    Sources must be contiguous in the last dimension, outs in the last two. If outs are the sources, RoPE is applied in
    place and values are not touched.
    """
    tokens, queries, size = sources[0].shape
    keys = sources[1].shape[1]
    heads = min(_HEADS, block_of(queries))
    in_place = outs[2] is sources[2]
    blocks = ceil_div(queries, heads), ceil_div(keys, heads), 0 if in_place else ceil_div(keys, heads)
    launch(
        _rope, (tokens * sum(blocks),),
        *[argument for source in sources for argument in (source, source.stride(0), source.stride(1))],
        *[argument for out in outs for argument in (out, out.stride(0))], queries, keys, cos, sin,
        BACKWARD=backward, QUERY_BLOCKS=blocks[0], KEY_BLOCKS=blocks[1], VALUE_BLOCKS=blocks[2], HEADS=heads,
        HALF=size // 2, BLOCK=block_of(size // 2), num_warps=2,
    )  # fmt: skip


@triton.jit
def _load_rope_backward(
    part, token_stride, head_stride, heads, c, s, multiplier, start,
    ROTATED: tl.constexpr, SCALED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Load both halves of a token's heads, undo RoPE, and compute their amax. `start` is their column in the row."""
    head = tl.arange(0, HEADS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (head < heads) & (cols < HALF)
    ptrs = part + tl.program_id(0).to(tl.int64) * token_stride + head * head_stride + cols
    low = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
    if ROTATED:
        low, high = low * c + high * s, high * c - low * s
    if SCALED:
        multiplier_ptrs = multiplier + start + head * 2 * HALF + cols
        low *= tl.load(multiplier_ptrs, mask=mask, other=0.0)
        high *= tl.load(multiplier_ptrs + HALF, mask=mask, other=0.0)
    return low, high, nan_amax(nan_amax(nan_max(tl.abs(low), tl.abs(high)), 1), 0)


@triton.jit
def _store_quantized(
    out, low, high, inverse, heads, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    head = tl.arange(0, HEADS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (head < heads) & (cols < HALF)
    to = out + head * 2 * HALF + cols
    tl.store(to, to_e4m3(low * inverse), mask=mask)
    tl.store(to + HALF, to_e4m3(high * inverse), mask=mask)


@triton.jit
def _rope_backward_quantized(
    q, q_token, q_head, k, k_token, k_head, v, v_token, v_head, queries, keys, cos, sin, multiplier,
    out, out_stride, scales,
    SCALED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """RoPE backward of a token's query, key and value gradients, quantized as one row."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)[None, :]
    c = tl.load(cos + token * 2 * HALF + cols, mask=cols < HALF, other=1.0).to(tl.float32)
    s = tl.load(sin + token * 2 * HALF + cols, mask=cols < HALF, other=0.0).to(tl.float32)
    k_start = queries * 2 * HALF
    v_start = k_start + keys * 2 * HALF
    q_low, q_high, q_amax = _load_rope_backward(
        q, q_token, q_head, queries, c, s, multiplier, 0, True, SCALED, QUERIES, HALF, BLOCK
    )
    k_low, k_high, k_amax = _load_rope_backward(
        k, k_token, k_head, keys, c, s, multiplier, k_start, True, SCALED, KEYS, HALF, BLOCK
    )
    v_low, v_high, v_amax = _load_rope_backward(
        v, v_token, v_head, keys, c, s, multiplier, v_start, False, SCALED, KEYS, HALF, BLOCK
    )
    scale = row_scale(nan_max(q_amax, nan_max(k_amax, v_amax)))
    tl.store(scales + token, scale)
    inverse = 1.0 / scale
    out += token * out_stride
    _store_quantized(out, q_low, q_high, inverse, queries, QUERIES, HALF, BLOCK)
    _store_quantized(out + k_start, k_low, k_high, inverse, keys, KEYS, HALF, BLOCK)
    _store_quantized(out + v_start, v_low, v_high, inverse, keys, KEYS, HALF, BLOCK)


def rope_backward_quantized(
    parts: tuple[Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor, multiplier: Tensor | None, out: Tensor,
    scales: Tensor,
) -> None:  # fmt: skip
    """RoPE backward of `parts` [tokens, heads, size] (last dimension contiguous) to `out` [tokens, all heads * size +
    padding]."""
    tokens, queries, size = parts[0].shape
    keys = parts[1].shape[1]
    strided_inputs = [argument for part in parts for argument in (part, part.stride(0), part.stride(1))]
    blocks = block_of(queries), block_of(keys), block_of(size // 2)
    values = (blocks[0] + 2 * blocks[1]) * 2 * blocks[2]
    launch(
        _rope_backward_quantized, (tokens,),
        *strided_inputs, queries, keys, cos, sin, multiplier, out, out.stride(0), scales,
        SCALED=multiplier is not None, QUERIES=blocks[0], KEYS=blocks[1], HALF=size // 2, BLOCK=blocks[2],
        num_warps=min(16, block_of(ceil_div(values, _VALUES))),
    )  # fmt: skip
