"""Rotation: one program for eight heads of a token. Rotation and quantisation: one program a token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.triton_support import block_of, ceil_div, larger, largest, launch, row_scale, to_e4m3

_VALUES = 3072
"""Of a token, for one warp: 96 in the registers of a thread."""


@triton.jit
def _turn(
    source, token_stride, head_stride, out, out_stride, cos, sin, heads, rotated,
    HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """`heads` heads of one token from `source` to `out`; the first `rotated` of them turned."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    live = (head < heads) & (at < HALF)
    turns = live & (head < rotated)
    c = tl.load(cos + token * 2 * HALF + at, mask=turns, other=1.0).to(tl.float32)
    s = tl.load(sin + token * 2 * HALF + at, mask=turns, other=0.0).to(tl.float32)
    if BACK:
        s = -s
    low = source + token * token_stride + head * head_stride + at
    a = tl.load(low, mask=live, other=0.0).to(tl.float32)
    b = tl.load(low + HALF, mask=live, other=0.0).to(tl.float32)
    to = out + token * out_stride + head * 2 * HALF + at
    tl.store(to, (a * c - b * s).to(out.dtype.element_ty), mask=live)
    tl.store(to + HALF, (b * c + a * s).to(out.dtype.element_ty), mask=live)


def turn(source: Tensor, out: Tensor, cos: Tensor, sin: Tensor, rotated: int, back: bool) -> None:
    """`source` [tokens, heads, size] (any strides but the last) to `out` [tokens, heads * size] (any row stride)."""
    tokens, heads, size = source.shape
    block = min(8, block_of(heads))
    launch(
        _turn, (tokens, ceil_div(heads, block)),
        source, source.stride(0), source.stride(1), out, out.stride(0), cos, sin, heads, rotated,
        HALF=size // 2, BLOCK=block_of(size // 2), HEADS=block, BACK=back, num_warps=2,
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
