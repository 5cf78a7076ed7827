"""Transposition of bytes, tile by tile.

Bytes move four at once: squares of 4 x 4 are transposed in registers, as four words, and then words change places
instead of bytes (132 us for the weights of a layer of Llama-3.1-8B's shape, 159 us byte by byte; H200).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.triton_support import ceil_div, launch

WORD = 4
_ROWS, _COLUMNS = 32, 64  # of a tile, in words


@triton.jit
def _transpose(
    source, source_stride, out, out_stride, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """`rows` and `columns` count squares, strides count words."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live = (r[:, None] < rows) & (c[None, :] < columns)
    at = source + (4 * r[:, None]).to(tl.int64) * source_stride + c[None, :]
    w0 = tl.load(at, mask=live, other=0)
    w1 = tl.load(at + source_stride, mask=live, other=0)
    w2 = tl.load(at + 2 * source_stride, mask=live, other=0)
    w3 = tl.load(at + 3 * source_stride, mask=live, other=0)
    # bytes 0 and 2, and bytes 1 and 3, of two rows side by side
    a0 = (w0 & 0x00FF00FF) | ((w1 & 0x00FF00FF) << 8)
    a1 = ((w0 >> 8) & 0x00FF00FF) | (w1 & 0xFF00FF00)
    b0 = (w2 & 0x00FF00FF) | ((w3 & 0x00FF00FF) << 8)
    b1 = ((w2 >> 8) & 0x00FF00FF) | (w3 & 0xFF00FF00)
    to = out + (4 * c[:, None]).to(tl.int64) * out_stride + r[None, :]
    there = (c[:, None] < columns) & (r[None, :] < rows)
    tl.store(to, tl.trans((a0 & 0xFFFF) | (b0 << 16)), mask=there)
    tl.store(to + out_stride, tl.trans((a1 & 0xFFFF) | (b1 << 16)), mask=there)
    tl.store(to + 2 * out_stride, tl.trans((a0 >> 16) | (b0 & 0xFFFF0000)), mask=there)
    tl.store(to + 3 * out_stride, tl.trans((a1 >> 16) | (b1 & 0xFFFF0000)), mask=there)


def in_words(source: Tensor) -> bool:
    """Whether the kernel can take this matrix: it reads whole words, and writes them."""
    numbers = (*source.shape, source.stride(0), source.storage_offset(), source.data_ptr())
    return source.stride(1) == 1 and all(number % WORD == 0 for number in numbers)


def transpose(source: Tensor, out: Tensor) -> None:
    rows, columns = source.shape[0] // WORD, source.shape[1] // WORD
    source, out = source.view(torch.uint32), out.view(torch.uint32)
    grid = (ceil_div(rows, _ROWS), ceil_div(columns, _COLUMNS))
    launch(
        _transpose, grid, source, source.stride(0), out, out.stride(0), rows, columns,
        ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=8,
    )  # fmt: skip
