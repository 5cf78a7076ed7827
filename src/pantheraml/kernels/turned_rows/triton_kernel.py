"""Four rows at a time: their bytes in one column make a word, and then words change places instead of bytes.

A tile is 128 rows by 128 columns: lines of 128 bytes are read, and lines of 128 bytes are written, 16 by a thread.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.triton_support import (
    LARGEST,
    ceil_div,
    from_e4m3,
    larger,
    largest,
    launch,
    power_scale,
    to_e4m3,
)

ALIGNED = 16
"""Bytes: of where rows begin, and of their lengths."""
_WORDS, _COLUMNS = 32, 128  # of a tile; words are of four rows
_MOST_ROWS, _MOST_COLUMNS, _MOST_PROGRAMS = 16, 256, 1056  # eight programs for each of an H200's processors


@triton.jit
def _largest(payload, payload_stride, factors, bits, rows, columns, share, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Largest magnitude of each column, as the bits of non-negative floats, of which NaN's are the largest."""
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, rows)
    most = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(begin, end, ROWS):
        r = first + tl.arange(0, ROWS)
        live = (r[:, None] < end) & (c[None, :] < columns)
        values = tl.load(payload + r[:, None].to(tl.int64) * payload_stride + c[None, :], mask=live, other=0.0)
        factor = tl.load(factors + r, mask=r < end, other=0.0)
        most = larger(most, tl.abs(from_e4m3(values) * factor[:, None]))
    tl.atomic_max(bits + c, largest(most, 0).to(tl.int32, bitcast=True), mask=c < columns, sem="relaxed")


@triton.jit
def _bytes(at, live, factors, r, rows, inverse, SCALED: tl.constexpr):
    """Rows of a tile as they will be, in the lowest byte of words."""
    if SCALED:
        factor = tl.load(factors + r, mask=r < rows, other=0.0)
        # in this order: two factors alone may leave the range of float32 where the value is nought
        values = from_e4m3(tl.load(at, mask=live, other=0.0)) * factor[:, None] * inverse[None, :]
        found = to_e4m3(values).to(tl.uint8, bitcast=True)
    else:
        found = tl.load(at, mask=live, other=0)
    return found.to(tl.uint32)


@triton.jit
def _turn(
    payload, payload_stride, factors, bits, scales, out, out_pieces, rows, columns,
    SCALED: tl.constexpr, WORDS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`out` is in words, and `out_pieces` of 16 bytes make one of its rows."""
    r = (tl.program_id(0) * WORDS + tl.arange(0, WORDS)) * 4
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inverse = 0.0
    if SCALED:
        found = tl.load(bits + c, mask=c < columns, other=0).to(tl.float32, bitcast=True)
        scale = power_scale(found, LARGEST)
        tl.store(scales + c, scale, mask=(c < columns) & (tl.program_id(0) == 0))
        inverse = tl.where(scale == scale, 1.0 / scale, 0.0)  # so that what is behind the rows stays nought
    at = payload + r[:, None].to(tl.int64) * payload_stride + c[None, :]
    there = c[None, :] < columns
    words = _bytes(at, (r[:, None] < rows) & there, factors, r, rows, inverse, SCALED)
    for i in tl.static_range(1, 4):
        live = (r[:, None] + i < rows) & there
        words |= _bytes(at + i * payload_stride, live, factors, r + i, rows, inverse, SCALED) << (8 * i)
    w = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    to = out + c[:, None].to(tl.int64) * (out_pieces * 4) + w[None, :]
    tl.store(to, tl.trans(words), mask=(c[:, None] < columns) & (w[None, :] < out_pieces * 4))


def aligned(payload: Tensor) -> bool:
    """Whether the kernels can take these rows."""
    numbers = (payload.shape[1], payload.stride(0), payload.data_ptr())
    return payload.stride(1) == 1 and all(number % ALIGNED == 0 for number in numbers)


def turn(payload: Tensor, factors: Tensor | None, out: Tensor, scales: Tensor | None) -> None:
    rows, columns = payload.shape
    bits = None
    if factors is not None:
        bits = torch.zeros(columns, dtype=torch.int32, device=payload.device)
        across = ceil_div(columns, _MOST_COLUMNS)
        share = ceil_div(ceil_div(rows, max(1, _MOST_PROGRAMS // across)), _MOST_ROWS) * _MOST_ROWS
        launch(
            _largest, (across, ceil_div(rows, share)),
            payload, payload.stride(0), factors, bits, rows, columns, share, ROWS=_MOST_ROWS, COLUMNS=_MOST_COLUMNS,
        )  # fmt: skip
    launch(
        _turn, (ceil_div(rows, 4 * _WORDS), ceil_div(columns, _COLUMNS)),
        payload if factors is not None else payload.view(torch.uint8), payload.stride(0), factors, bits, scales,
        out.view(torch.uint32), out.shape[1] // 16, rows, columns,
        SCALED=factors is not None, WORDS=_WORDS, COLUMNS=_COLUMNS,
    )  # fmt: skip
