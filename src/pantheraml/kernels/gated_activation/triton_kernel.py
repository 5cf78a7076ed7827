"""One program a row. A row that the registers cannot hold goes in chunks, and twice: first to find its largest
magnitude, then to write; the second pass finds its inputs in the cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.triton_support import LIMIT, SMALLEST_SCALE, block_of, launch, row_warps, to_e4m3

_WHOLE, _CHUNK = 16384, 2048


@triton.jit
def _activation(gate, GELU: tl.constexpr):
    """The activation of `gate` and its derivative."""
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        inner_slope = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * gate * gate)
        # (1 + tanh) / 2 and (1 - tanh ** 2) / 2 from an exponential that cannot overflow, and without cancellation
        small = tl.exp(-2.0 * tl.abs(inner))
        share = tl.where(inner < 0.0, small, 1.0) / (1.0 + small)
        steep = 2.0 * small / ((1.0 + small) * (1.0 + small))
        active = gate * share
        slope = share + gate * steep * inner_slope
    else:
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        active = gate * sigmoid
        slope = sigmoid + active * (1.0 - sigmoid)
    return active, slope


@triton.jit
def _hidden(pair, at, columns, GELU: tl.constexpr):
    gate = tl.load(pair + at, mask=at < columns, other=0.0).to(tl.float32)
    up = tl.load(pair + columns + at, mask=at < columns, other=0.0).to(tl.float32)
    active, _ = _activation(gate, GELU)
    return active * up


@triton.jit
def _forward(
    pair, out, out_stride, scales, columns,
    GELU: tl.constexpr, QUANTISE: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    pair += row * columns * 2
    out += row * out_stride
    dtype = pair.dtype.element_ty
    at = tl.arange(0, BLOCK)
    hidden = _hidden(pair, at, columns, GELU)
    if QUANTISE:
        largest = tl.abs(hidden)
        if not WHOLE:
            for start in range(BLOCK, columns, BLOCK):
                largest = tl.maximum(largest, tl.abs(_hidden(pair, start + at, columns, GELU)))
        scale = tl.maximum(tl.max(largest, 0) / LIMIT, SMALLEST_SCALE)
        tl.store(scales + row, scale)
        inverse = 1.0 / scale
        tl.store(out + at, to_e4m3(hidden * inverse), mask=at < columns)
    else:
        inverse = 1.0
        tl.store(out + at, hidden.to(dtype), mask=at < columns)
    if not WHOLE:
        for start in range(BLOCK, columns, BLOCK):
            hidden = _hidden(pair, start + at, columns, GELU)
            if QUANTISE:
                tl.store(out + start + at, to_e4m3(hidden * inverse), mask=start + at < columns)
            else:
                tl.store(out + start + at, hidden.to(dtype), mask=start + at < columns)


@triton.jit
def _parts(g, pair, multiplier, at, columns, GELU: tl.constexpr, SCALED: tl.constexpr):
    """The hidden values, and the gradients of gate and up (times the multiplier)."""
    live = at < columns
    gate = tl.load(pair + at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(pair + columns + at, mask=live, other=0.0).to(tl.float32)
    grad = tl.load(g + at, mask=live, other=0.0).to(tl.float32)
    active, slope = _activation(gate, GELU)
    d_gate = grad * up * slope
    d_up = grad * active
    if SCALED:
        d_gate *= tl.load(multiplier + at, mask=live, other=0.0)
        d_up *= tl.load(multiplier + columns + at, mask=live, other=0.0)
    return active * up, d_gate, d_up


@triton.jit
def _backward(
    g, pair, multiplier, hidden, hidden_stride, hidden_scales, out, out_stride, scales, columns,
    GELU: tl.constexpr, SCALED: tl.constexpr, QUANTISE: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    g += row * columns
    pair += row * columns * 2
    hidden += row * hidden_stride
    out += row * out_stride
    dtype = pair.dtype.element_ty
    at = tl.arange(0, BLOCK)
    h, d_gate, d_up = _parts(g, pair, multiplier, at, columns, GELU, SCALED)
    inverse = 1.0
    hidden_inverse = 1.0
    if QUANTISE:
        hidden_largest = tl.abs(h)
        largest = tl.maximum(tl.abs(d_gate), tl.abs(d_up))
        if not WHOLE:
            for start in range(BLOCK, columns, BLOCK):
                h_, d_gate_, d_up_ = _parts(g, pair, multiplier, start + at, columns, GELU, SCALED)
                hidden_largest = tl.maximum(hidden_largest, tl.abs(h_))
                largest = tl.maximum(largest, tl.maximum(tl.abs(d_gate_), tl.abs(d_up_)))
        scale = tl.maximum(tl.max(largest, 0) / LIMIT, SMALLEST_SCALE)
        hidden_scale = tl.maximum(tl.max(hidden_largest, 0) / LIMIT, SMALLEST_SCALE)
        tl.store(scales + row, scale)
        tl.store(hidden_scales + row, hidden_scale)
        inverse = 1.0 / scale
        hidden_inverse = 1.0 / hidden_scale
    for start in range(0, BLOCK if WHOLE else columns, BLOCK):
        live = start + at < columns
        if not WHOLE:
            h, d_gate, d_up = _parts(g, pair, multiplier, start + at, columns, GELU, SCALED)
        if QUANTISE:
            tl.store(hidden + start + at, to_e4m3(h * hidden_inverse), mask=live)
            tl.store(out + start + at, to_e4m3(d_gate * inverse), mask=live)
            tl.store(out + columns + start + at, to_e4m3(d_up * inverse), mask=live)
        else:
            tl.store(hidden + start + at, h.to(dtype), mask=live)
            tl.store(out + start + at, d_gate.to(dtype), mask=live)
            tl.store(out + columns + start + at, d_up.to(dtype), mask=live)


def _block(columns: int) -> int:
    """A whole row where it fits into the registers of one program, else chunks."""
    block = block_of(columns)
    return block if block <= _WHOLE else _CHUNK


def forward(pair: Tensor, out: Tensor, scales: Tensor | None, gelu: bool) -> None:
    rows, columns = pair.shape[0], pair.shape[1] // 2
    block = _block(columns)
    launch(
        _forward, (rows,),
        pair, out, out.stride(0), scales, columns,
        GELU=gelu, QUANTISE=scales is not None, WHOLE=block >= columns, BLOCK=block, num_warps=row_warps(block),
    )  # fmt: skip


def backward(
    g: Tensor,
    pair: Tensor,
    multiplier: Tensor | None,
    hidden: Tensor,
    hidden_scales: Tensor | None,
    out: Tensor,
    scales: Tensor | None,
    gelu: bool,
) -> None:
    rows, columns = g.shape
    block = _block(columns)
    launch(
        _backward, (rows,),
        g, pair, multiplier, hidden, hidden.stride(0), hidden_scales, out, out.stride(0), scales, columns,
        GELU=gelu, SCALED=multiplier is not None, QUANTISE=scales is not None, WHOLE=block >= columns, BLOCK=block,
        num_warps=row_warps(block),
    )  # fmt: skip
