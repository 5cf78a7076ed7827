"""Both directions read rows and write rows, 16 bytes a thread.

For a transposed matrix four rows are taken at a time: their bytes in one column make a word, and then words change
places instead of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.triton_support import (
    INTERPRETED,
    LARGEST,
    ceil_div,
    larger,
    largest,
    launch,
    power_scale,
    to_e4m3,
)

ALIGNED = 16
"""Values: of where rows begin in either matrix, and of both sizes."""
_MOST_ROWS, _MOST_COLUMNS, _MOST_PROGRAMS = 4, 1024, 1056  # eight programs for each of an H200's processors
_ROWS, _COLUMNS = 8, 512
_WORDS, _WIDTH = 32, 128  # of a transposed tile; words are of four rows
_SCALES = 1024


@triton.jit
def _largest(weight, weight_stride, bits, rows, columns, share, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Largest magnitude, as the bits of a non-negative float, of which NaN's are the largest."""
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, rows)
    most = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(begin, end, ROWS):
        r = first + tl.arange(0, ROWS)
        live = (r[:, None] < end) & (c[None, :] < columns)
        values = tl.load(weight + r[:, None].to(tl.int64) * weight_stride + c[None, :], mask=live, other=0.0)
        most = larger(most, tl.abs(values.to(tl.float32)))
    tl.atomic_max(bits, largest(largest(most, 0), 0).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def _spread(bits, scales, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scale = power_scale(tl.load(bits).to(tl.float32, bitcast=True), LARGEST)
    tl.store(scales + at, tl.zeros((BLOCK,), tl.float32) + scale, mask=at < count)


@triton.jit
def _write(
    weight, weight_stride, scales, out, out_stride, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live = (r[:, None] < rows) & (c[None, :] < columns)
    inverse = 1.0 / tl.load(scales)
    at = r[:, None].to(tl.int64)
    values = tl.load(weight + at * weight_stride + c[None, :], mask=live, other=0.0).to(tl.float32)
    tl.store(out + at * out_stride + c[None, :], to_e4m3(values * inverse), mask=live)


@triton.jit
def _bytes(at, live, inverse):
    """Rows of a tile in e4m3, in the lowest byte of words."""
    values = tl.load(at, mask=live, other=0.0).to(tl.float32)
    return to_e4m3(values * inverse).to(tl.uint8, bitcast=True).to(tl.uint32)


@triton.jit
def _write_transposed(
    weight, weight_stride, scales, out, out_pieces, pieces, columns, WORDS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """`out` [columns, rows] is in words; its rows are `pieces` of 16 bytes long, and `out_pieces` apart."""
    w = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live = (w[:, None] < pieces * 4) & (c[None, :] < columns)
    inverse = 1.0 / tl.load(scales)
    at = weight + (w[:, None] * 4).to(tl.int64) * weight_stride + c[None, :]
    words = _bytes(at, live, inverse)
    for i in tl.static_range(1, 4):
        words |= _bytes(at + i * weight_stride, live, inverse) << (8 * i)
    to = out + c[:, None].to(tl.int64) * (out_pieces * 4) + w[None, :]
    tl.store(to, tl.trans(words), mask=(c[:, None] < columns) & (w[None, :] < pieces * 4))


def scales(weights: Sequence[Tensor], out: Tensor) -> None:
    bits = torch.zeros(1, dtype=torch.int32, device=out.device)
    for weight in weights:
        rows, columns = weight.shape
        across = ceil_div(columns, _MOST_COLUMNS)
        share = ceil_div(ceil_div(rows, max(1, _MOST_PROGRAMS // across)), _MOST_ROWS) * _MOST_ROWS
        launch(
            _largest, (across, ceil_div(rows, share)),
            weight, weight.stride(0), bits, rows, columns, share, ROWS=_MOST_ROWS, COLUMNS=_MOST_COLUMNS,
        )  # fmt: skip
    count = out.shape[0]
    launch(_spread, (ceil_div(count, _SCALES),), bits, out, count, BLOCK=_SCALES)


def fits(weight: Tensor, out: Tensor) -> bool:
    """Whether `write` can take these matrices. Not from float32, which came out wrong on an H200 (Triton 3.6)."""
    numbers = (*weight.shape, weight.stride(0), max(out.stride()), out.data_ptr())
    right = weight.dtype == torch.bfloat16 or INTERPRETED
    return right and weight.stride(1) == 1 and all(number % ALIGNED == 0 for number in numbers)


def write(weight: Tensor, scales: Tensor, out: Tensor) -> None:
    rows, columns = weight.shape
    if out.stride(1) == 1:
        grid = (ceil_div(rows, _ROWS), ceil_div(columns, _COLUMNS))
        launch(
            _write, grid, weight, weight.stride(0), scales, out, out.stride(0), rows, columns,
            ROWS=_ROWS, COLUMNS=_COLUMNS,
        )  # fmt: skip
        return
    grid = (ceil_div(rows, 4 * _WORDS), ceil_div(columns, _WIDTH))
    launch(
        _write_transposed, grid,
        weight, weight.stride(0), scales, out.T.view(torch.uint32), out.stride(1) // 16, rows // 16, columns,
        WORDS=_WORDS, COLUMNS=_WIDTH,
    )  # fmt: skip
