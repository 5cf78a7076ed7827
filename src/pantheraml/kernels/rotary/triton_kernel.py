"""Rotation: one program for eight heads of a token. Rotation and quantisation: one program a token."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.triton_support import block_of, ceil_div, larger, largest, launch, row_scale, to_e4m3

_HEADS = 8
"""Of a token, for the two warps of a program: 16 bytes a thread of each half."""
_VALUES = 3072
"""Of a token, for one warp: 96 in the registers of a thread."""


@triton.jit
def _turn_heads(
    source, token_stride, head_stride, out, out_stride, first, heads, token, cos, sin,
    ROTATED: tl.constexpr, BACK: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """HEADS of the `heads` heads of a token, from `first` on."""
    head = first + tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    live = (head < heads) & (at < HALF)
    place = source + token * token_stride + head * head_stride + at
    to = out + token * out_stride + head * 2 * HALF + at
    low = tl.load(place, mask=live, other=0.0)
    high = tl.load(place + HALF, mask=live, other=0.0)
    if ROTATED:
        # once a head, though alike: a mask of one row would send them to the other rows through shared memory
        c = tl.load(cos + token * 2 * HALF + at, mask=live, other=1.0).to(tl.float32)
        s = tl.load(sin + token * 2 * HALF + at, mask=live, other=0.0).to(tl.float32)
        if BACK:
            s = -s
        a, b = low.to(tl.float32), high.to(tl.float32)
        low, high = a * c - b * s, b * c + a * s
    tl.store(to, low.to(out.dtype.element_ty), mask=live)
    tl.store(to + HALF, high.to(out.dtype.element_ty), mask=live)


@triton.jit
def _turn(
    q, q_token, q_head, k, k_token, k_head, v, v_token, v_head,
    q_out, q_stride, k_out, k_stride, v_out, v_stride, queries, keys, cos, sin,
    BACK: tl.constexpr, QUERY_BLOCKS: tl.constexpr, KEY_BLOCKS: tl.constexpr, VALUE_BLOCKS: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of one token a block of query heads or of key heads, turned, or one of value heads, as it is."""
    blocks: tl.constexpr = QUERY_BLOCKS + KEY_BLOCKS + VALUE_BLOCKS
    token = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    if block < QUERY_BLOCKS:
        _turn_heads(
            q, q_token, q_head, q_out, q_stride, block * HEADS, queries, token, cos, sin,
            True, BACK, HEADS, HALF, BLOCK,
        )  # fmt: skip
    elif block < QUERY_BLOCKS + KEY_BLOCKS:
        _turn_heads(
            k, k_token, k_head, k_out, k_stride, (block - QUERY_BLOCKS) * HEADS, keys, token, cos, sin,
            True, BACK, HEADS, HALF, BLOCK,
        )  # fmt: skip
    else:
        _turn_heads(
            v, v_token, v_head, v_out, v_stride, (block - QUERY_BLOCKS - KEY_BLOCKS) * HEADS, keys, token, cos, sin,
            False, BACK, HEADS, HALF, BLOCK,
        )  # fmt: skip


def turn(sources: Sequence[Tensor], outs: Sequence[Tensor], cos: Tensor, sin: Tensor, *, back: bool) -> None:
    """Query, key and value of `sources` to those of `outs`, each [tokens, heads, size]. A source may have any strides
    but the last, an out any but the last two. Where an out is its source, nothing is done to the value, and the others
    turn in their place."""
    tokens, queries, size = sources[0].shape
    keys = sources[1].shape[1]
    heads = min(_HEADS, block_of(queries))
    in_place = outs[2] is sources[2]
    blocks = ceil_div(queries, heads), ceil_div(keys, heads), 0 if in_place else ceil_div(keys, heads)
    launch(
        _turn, (tokens * sum(blocks),),
        *[argument for source in sources for argument in (source, source.stride(0), source.stride(1))],
        *[argument for out in outs for argument in (out, out.stride(0))], queries, keys, cos, sin,
        BACK=back, QUERY_BLOCKS=blocks[0], KEY_BLOCKS=blocks[1], VALUE_BLOCKS=blocks[2], HEADS=heads, HALF=size // 2,
        BLOCK=block_of(size // 2), num_warps=2,
    )  # fmt: skip


@triton.jit
def _turned_back(
    part, token_stride, head_stride, heads, c, s, multiplier, start,
    ROTATED: tl.constexpr, SCALED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Both halves of all heads of a token, and their largest magnitude. `start` is where in the row they begin."""
    head = tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    live = (head < heads) & (at < HALF)
    place = part + tl.program_id(0).to(tl.int64) * token_stride + head * head_stride + at
    low = tl.load(place, mask=live, other=0.0).to(tl.float32)
    high = tl.load(place + HALF, mask=live, other=0.0).to(tl.float32)
    if ROTATED:
        low, high = low * c + high * s, high * c - low * s
    if SCALED:
        of = multiplier + start + head * 2 * HALF + at
        low *= tl.load(of, mask=live, other=0.0)
        high *= tl.load(of + HALF, mask=live, other=0.0)
    return low, high, largest(largest(larger(tl.abs(low), tl.abs(high)), 1), 0)


@triton.jit
def _put(
    out, low, high, inverse, heads, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    head = tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    live = (head < heads) & (at < HALF)
    to = out + head * 2 * HALF + at
    tl.store(to, to_e4m3(low * inverse), mask=live)
    tl.store(to + HALF, to_e4m3(high * inverse), mask=live)


@triton.jit
def _turn_and_quantise(
    q, q_token, q_head, k, k_token, k_head, v, v_token, v_head, queries, keys, cos, sin, multiplier,
    out, out_stride, scales,
    SCALED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of a token's query, key and value heads, turned back and quantised as one row."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)[None, :]
    c = tl.load(cos + token * 2 * HALF + at, mask=at < HALF, other=1.0).to(tl.float32)
    s = tl.load(sin + token * 2 * HALF + at, mask=at < HALF, other=0.0).to(tl.float32)
    k_start = queries * 2 * HALF
    v_start = k_start + keys * 2 * HALF
    q_low, q_high, q_most = _turned_back(
        q, q_token, q_head, queries, c, s, multiplier, 0, True, SCALED, QUERIES, HALF, BLOCK
    )
    k_low, k_high, k_most = _turned_back(
        k, k_token, k_head, keys, c, s, multiplier, k_start, True, SCALED, KEYS, HALF, BLOCK
    )
    v_low, v_high, v_most = _turned_back(
        v, v_token, v_head, keys, c, s, multiplier, v_start, False, SCALED, KEYS, HALF, BLOCK
    )
    scale = row_scale(larger(q_most, larger(k_most, v_most)))
    tl.store(scales + token, scale)
    inverse = 1.0 / scale
    out += token * out_stride
    _put(out, q_low, q_high, inverse, queries, QUERIES, HALF, BLOCK)
    _put(out + k_start, k_low, k_high, inverse, keys, KEYS, HALF, BLOCK)
    _put(out + v_start, v_low, v_high, inverse, keys, KEYS, HALF, BLOCK)


def turn_back_and_quantise(
    parts: tuple[Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor, multiplier: Tensor | None, out: Tensor,
    scales: Tensor,
) -> None:  # fmt: skip
    """`parts` [tokens, heads, size] (any strides but the last) to `out` [tokens, all heads * size + room]."""
    tokens, queries, size = parts[0].shape
    keys = parts[1].shape[1]
    places = [argument for part in parts for argument in (part, part.stride(0), part.stride(1))]
    blocks = block_of(queries), block_of(keys), block_of(size // 2)
    values = (blocks[0] + 2 * blocks[1]) * 2 * blocks[2]
    launch(
        _turn_and_quantise, (tokens,),
        *places, queries, keys, cos, sin, multiplier, out, out.stride(0), scales,
        SCALED=multiplier is not None, QUERIES=blocks[0], KEYS=blocks[1], HALF=size // 2, BLOCK=blocks[2],
        num_warps=min(16, block_of(ceil_div(values, _VALUES))),
    )  # fmt: skip
