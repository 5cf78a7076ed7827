"""One program a row. A row that the registers cannot hold goes in chunks, and twice: first to find its largest
magnitude, then to write; the second pass finds its inputs in the cache.

Rows that fill the registers of a processor leave it nothing else to do while it waits for memory. So on the way back,
where shared memory has room for it, a program takes many rows and fetches the next two meanwhile. In Llama-3.1-8B's
shape and 8,192 tokens that takes 269 us between products, as in a step (H200); one row at a time 347 us, and a row as
one block, which is rounded up to a power of two, 380 us.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.triton_support import (
    INTERPRETED,
    block_of,
    ceil_div,
    larger,
    largest,
    launch,
    processors,
    row_scale,
    row_warps,
    to_e4m3,
)

_WHOLE, _CHUNK = 16384, 2048
_STAGES = 3


@triton.jit
def _sigmoid(x):
    if INTERPRETED:
        return 1.0 / (1.0 + tl.exp(-x))
    # With an approximate reciprocal (2**-23) in place of a division, which takes as long as all the rest.
    return tl.inline_asm_elementwise(
        """{ .reg .f32 t; mul.ftz.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t;
        add.ftz.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }""",
        "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


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
        sigmoid = _sigmoid(gate)
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
def _put(values, inverse, out, at, columns, QUANTISE: tl.constexpr):
    if QUANTISE:
        tl.store(out + at, to_e4m3(values * inverse), mask=at < columns)
    else:
        tl.store(out + at, values.to(out.dtype.element_ty), mask=at < columns)


@triton.jit
def _gate_forward(
    pair, out, out_stride, scales, columns,
    GELU: tl.constexpr, QUANTISE: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """COUNT blocks make up a row, and stay in the registers: as one they would be rounded up to a power of two. 0: the
    registers do not hold a row."""
    row = tl.program_id(0).to(tl.int64)
    pair += row * columns * 2
    out += row * out_stride
    at = tl.arange(0, BLOCK)
    most = tl.zeros((BLOCK,), tl.float32)
    kept = ()
    if COUNT > 0:
        for piece in tl.static_range(COUNT):
            hidden = _hidden(pair, piece * BLOCK + at, columns, GELU)
            most = larger(most, tl.abs(hidden))
            kept += (hidden,)  # type: ignore[assignment]
    elif QUANTISE:
        for start in range(0, columns, BLOCK):
            most = larger(most, tl.abs(_hidden(pair, start + at, columns, GELU)))
    inverse = 1.0
    if QUANTISE:
        scale = row_scale(largest(most, 0))
        tl.store(scales + row, scale)
        inverse = 1.0 / scale
    if COUNT > 0:
        for piece in tl.static_range(COUNT):
            _put(kept[piece], inverse, out, piece * BLOCK + at, columns, QUANTISE)
    else:
        for start in range(0, columns, BLOCK):
            _put(_hidden(pair, start + at, columns, GELU), inverse, out, start + at, columns, QUANTISE)


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
def _gate_backward(
    g, pair, multiplier, hidden, hidden_stride, hidden_scales, out, out_stride, scales, rows, columns, programs,
    GELU: tl.constexpr, SCALED: tl.constexpr, QUANTISE: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Whole rows, of COUNT blocks, each row `programs` after the one before, of which STAGES - 1 are on their way to
    shared memory."""
    at = tl.arange(0, BLOCK)
    first = tl.program_id(0)
    for offset in tl.range(0, rows - first, programs, num_stages=STAGES):
        row = first.to(tl.int64) + offset
        hidden_most = tl.zeros((BLOCK,), tl.float32)
        most = tl.zeros((BLOCK,), tl.float32)
        kept = ()
        for piece in tl.static_range(COUNT):
            here = piece * BLOCK + at
            h, d_gate, d_up = _parts(
                g + row * columns, pair + row * columns * 2, multiplier, here, columns, GELU, SCALED
            )
            hidden_most = larger(hidden_most, tl.abs(h))
            most = larger(most, larger(tl.abs(d_gate), tl.abs(d_up)))
            kept += ((h, d_gate, d_up),)  # type: ignore[assignment]
        inverse = 1.0
        hidden_inverse = 1.0
        if QUANTISE:
            scale = row_scale(largest(most, 0))
            hidden_scale = row_scale(largest(hidden_most, 0))
            tl.store(scales + row, scale)
            tl.store(hidden_scales + row, hidden_scale)
            inverse = 1.0 / scale
            hidden_inverse = 1.0 / hidden_scale
        for piece in tl.static_range(COUNT):
            here = piece * BLOCK + at
            h, d_gate, d_up = kept[piece]
            _put(h, hidden_inverse, hidden + row * hidden_stride, here, columns, QUANTISE)
            _put(d_gate, inverse, out + row * out_stride, here, columns, QUANTISE)
            _put(d_up, inverse, out + row * out_stride + columns, here, columns, QUANTISE)


@triton.jit
def _gate_backward_chunks(
    g, pair, multiplier, hidden, hidden_stride, hidden_scales, out, out_stride, scales, columns,
    GELU: tl.constexpr, SCALED: tl.constexpr, QUANTISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    g += row * columns
    pair += row * columns * 2
    hidden += row * hidden_stride
    out += row * out_stride
    at = tl.arange(0, BLOCK)
    inverse = 1.0
    hidden_inverse = 1.0
    if QUANTISE:
        hidden_most = tl.zeros((BLOCK,), tl.float32)
        most = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, columns, BLOCK):
            h, d_gate, d_up = _parts(g, pair, multiplier, start + at, columns, GELU, SCALED)
            hidden_most = larger(hidden_most, tl.abs(h))
            most = larger(most, larger(tl.abs(d_gate), tl.abs(d_up)))
        scale = row_scale(largest(most, 0))
        hidden_scale = row_scale(largest(hidden_most, 0))
        tl.store(scales + row, scale)
        tl.store(hidden_scales + row, hidden_scale)
        inverse = 1.0 / scale
        hidden_inverse = 1.0 / hidden_scale
    for start in range(0, columns, BLOCK):
        h, d_gate, d_up = _parts(g, pair, multiplier, start + at, columns, GELU, SCALED)
        _put(h, hidden_inverse, hidden, start + at, columns, QUANTISE)
        _put(d_gate, inverse, out, start + at, columns, QUANTISE)
        _put(d_up, inverse, out + columns, start + at, columns, QUANTISE)


def forward(pair: Tensor, out: Tensor, scales: Tensor | None, gelu: bool) -> None:
    rows, columns = pair.shape[0], pair.shape[1] // 2
    block = min(_CHUNK, block_of(columns))
    launch(
        _gate_forward, (rows,),
        pair, out, out.stride(0), scales, columns,
        GELU=gelu, QUANTISE=scales is not None, BLOCK=block, COUNT=ceil_div(columns, block) if columns <= _WHOLE else 0,
        num_warps=max(1, block // 128),
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
    block = min(_CHUNK, block_of(columns))
    tensors = (g, pair, multiplier, hidden, hidden.stride(0), hidden_scales, out, out.stride(0), scales)
    kinds = {"GELU": gelu, "SCALED": multiplier is not None, "QUANTISE": scales is not None, "BLOCK": block}
    if columns > _WHOLE:
        launch(_gate_backward_chunks, (rows,), *tensors, columns, **kinds, num_warps=row_warps(block))
        return
    count = ceil_div(columns, block)
    programs = 0 if multiplier is not None else _programs(g, pair, block * count)
    programs, stages = (min(programs, rows), _STAGES) if programs else (rows, 1)
    launch(
        _gate_backward, (programs,), *tensors, rows, columns, programs, **kinds, COUNT=count, STAGES=stages,
        num_warps=max(1, block // 256),
    )  # fmt: skip


def _programs(g: Tensor, pair: Tensor, values: int) -> int:
    """How many programs of the backward pass can run at once, all of them fetching rows of so many values ahead; 0:
    shared memory is too small for that. (With multipliers it always is: they would be fetched ahead too.)"""
    rows_ahead = (_STAGES - 1) * values * (g.element_size() + 2 * pair.element_size())
    number, shared_memory = processors(g.device)
    # each warp needs a few bytes to find the largest magnitude; and registers hold one wide row, or two narrow ones
    return number * min(shared_memory // (rows_ahead + 1024), max(1, _WHOLE // values))
