"""One program for eight heads of a token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.triton_support import block_of, ceil_div, launch


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
