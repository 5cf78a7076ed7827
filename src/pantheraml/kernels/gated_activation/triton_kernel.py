"""Gated activation with one program per row. Rows too large for registers are processed in chunks, twice: once for the
amax and once to write, reading the inputs from cache.

A row that fills an SM's registers leaves nothing to hide memory latency. So in the backward pass, if shared memory
allows, programs are persistent and prefetch the next two rows. For Llama-3.1-8B's shape and 8,192 tokens that takes
269 us between matmuls, as in a step (H200); one row per program takes 347 us, and a row as a single block, padded to a
power of two, 380 us.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.triton_support import (
    INTERPRETED,
    block_of,
    ceil_div,
    launch,
    nan_amax,
    nan_max,
    row_scale,
    row_warps,
    sm_limits,
    to_e4m3,
)

_MAX_WHOLE_ROW, _CHUNK = 16384, 2048
_STAGES = 3


@triton.jit
def _sigmoid(x):
    if INTERPRETED:
        return 1.0 / (1.0 + tl.exp(-x))
    # Approximate reciprocal (2**-23) instead of a division, which takes as long as everything else.
    return tl.inline_asm_elementwise(
        """{ .reg .f32 t; mul.ftz.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t;
        add.ftz.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }""",
        "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _activation(gate, GELU: tl.constexpr):
    """Activation of `gate` and its derivative."""
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        inner_derivative = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * gate * gate)
        # (1 + tanh) / 2 and (1 - tanh ** 2) / 2 from an exponential that cannot overflow, without cancellation
        decay = tl.exp(-2.0 * tl.abs(inner))
        cdf = tl.where(inner < 0.0, decay, 1.0) / (1.0 + decay)
        cdf_derivative = 2.0 * decay / ((1.0 + decay) * (1.0 + decay))
        active = gate * cdf
        derivative = cdf + gate * cdf_derivative * inner_derivative
    else:
        sigmoid = _sigmoid(gate)
        active = gate * sigmoid
        derivative = sigmoid + active * (1.0 - sigmoid)
    return active, derivative


@triton.jit
def _hidden(pair, cols, columns, GELU: tl.constexpr):
    gate = tl.load(pair + cols, mask=cols < columns, other=0.0).to(tl.float32)
    up = tl.load(pair + columns + cols, mask=cols < columns, other=0.0).to(tl.float32)
    active, _ = _activation(gate, GELU)
    return active * up


@triton.jit
def _store(values, inverse, out, cols, columns, QUANTIZE: tl.constexpr):
    if QUANTIZE:
        tl.store(out + cols, to_e4m3(values * inverse), mask=cols < columns)
    else:
        tl.store(out + cols, values.to(out.dtype.element_ty), mask=cols < columns)


@triton.jit
def _gate_forward(
    pair, out, out_stride, scales, columns,
    GELU: tl.constexpr, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """A row is COUNT blocks held in registers (a single block would be padded to a power of two). COUNT = 0: the row
    does not fit in registers."""
    row = tl.program_id(0).to(tl.int64)
    pair += row * columns * 2
    out += row * out_stride
    cols = tl.arange(0, BLOCK)
    amax = tl.zeros((BLOCK,), tl.float32)
    blocks = ()
    if COUNT > 0:
        for i in tl.static_range(COUNT):
            hidden = _hidden(pair, i * BLOCK + cols, columns, GELU)
            amax = nan_max(amax, tl.abs(hidden))
            blocks += (hidden,)  # type: ignore[assignment]
    elif QUANTIZE:
        for start in range(0, columns, BLOCK):
            amax = nan_max(amax, tl.abs(_hidden(pair, start + cols, columns, GELU)))
    inverse = 1.0
    if QUANTIZE:
        scale = row_scale(nan_amax(amax, 0))
        tl.store(scales + row, scale)
        inverse = 1.0 / scale
    if COUNT > 0:
        for i in tl.static_range(COUNT):
            _store(blocks[i], inverse, out, i * BLOCK + cols, columns, QUANTIZE)
    else:
        for start in range(0, columns, BLOCK):
            _store(_hidden(pair, start + cols, columns, GELU), inverse, out, start + cols, columns, QUANTIZE)


@triton.jit
def _backward_block(g, pair, multiplier, cols, columns, GELU: tl.constexpr, SCALED: tl.constexpr):
    """Hidden values and the gradients of gate and up (times the multiplier) for one block of columns."""
    mask = cols < columns
    gate = tl.load(pair + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(pair + columns + cols, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(g + cols, mask=mask, other=0.0).to(tl.float32)
    active, derivative = _activation(gate, GELU)
    d_gate = grad * up * derivative
    d_up = grad * active
    if SCALED:
        d_gate *= tl.load(multiplier + cols, mask=mask, other=0.0)
        d_up *= tl.load(multiplier + columns + cols, mask=mask, other=0.0)
    return active * up, d_gate, d_up


@triton.jit
def _gate_backward(
    g, pair, multiplier, hidden, hidden_stride, hidden_scales, out, out_stride, scales, rows, columns, programs,
    GELU: tl.constexpr, SCALED: tl.constexpr, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Persistent loop over whole rows of COUNT blocks with stride `programs`, prefetching STAGES - 1 rows to shared
    memory."""
    cols = tl.arange(0, BLOCK)
    first = tl.program_id(0)
    for offset in tl.range(0, rows - first, programs, num_stages=STAGES):
        row = first.to(tl.int64) + offset
        hidden_amax = tl.zeros((BLOCK,), tl.float32)
        amax = tl.zeros((BLOCK,), tl.float32)
        blocks = ()
        for i in tl.static_range(COUNT):
            block_cols = i * BLOCK + cols
            h, d_gate, d_up = _backward_block(
                g + row * columns, pair + row * columns * 2, multiplier, block_cols, columns, GELU, SCALED
            )
            hidden_amax = nan_max(hidden_amax, tl.abs(h))
            amax = nan_max(amax, nan_max(tl.abs(d_gate), tl.abs(d_up)))
            blocks += ((h, d_gate, d_up),)  # type: ignore[assignment]
        inverse = 1.0
        hidden_inverse = 1.0
        if QUANTIZE:
            scale = row_scale(nan_amax(amax, 0))
            hidden_scale = row_scale(nan_amax(hidden_amax, 0))
            tl.store(scales + row, scale)
            tl.store(hidden_scales + row, hidden_scale)
            inverse = 1.0 / scale
            hidden_inverse = 1.0 / hidden_scale
        for i in tl.static_range(COUNT):
            block_cols = i * BLOCK + cols
            h, d_gate, d_up = blocks[i]
            _store(h, hidden_inverse, hidden + row * hidden_stride, block_cols, columns, QUANTIZE)
            _store(d_gate, inverse, out + row * out_stride, block_cols, columns, QUANTIZE)
            _store(d_up, inverse, out + row * out_stride + columns, block_cols, columns, QUANTIZE)


@triton.jit
def _gate_backward_chunks(
    g, pair, multiplier, hidden, hidden_stride, hidden_scales, out, out_stride, scales, columns,
    GELU: tl.constexpr, SCALED: tl.constexpr, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    g += row * columns
    pair += row * columns * 2
    hidden += row * hidden_stride
    out += row * out_stride
    cols = tl.arange(0, BLOCK)
    inverse = 1.0
    hidden_inverse = 1.0
    if QUANTIZE:
        hidden_amax = tl.zeros((BLOCK,), tl.float32)
        amax = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, columns, BLOCK):
            h, d_gate, d_up = _backward_block(g, pair, multiplier, start + cols, columns, GELU, SCALED)
            hidden_amax = nan_max(hidden_amax, tl.abs(h))
            amax = nan_max(amax, nan_max(tl.abs(d_gate), tl.abs(d_up)))
        scale = row_scale(nan_amax(amax, 0))
        hidden_scale = row_scale(nan_amax(hidden_amax, 0))
        tl.store(scales + row, scale)
        tl.store(hidden_scales + row, hidden_scale)
        inverse = 1.0 / scale
        hidden_inverse = 1.0 / hidden_scale
    for start in range(0, columns, BLOCK):
        h, d_gate, d_up = _backward_block(g, pair, multiplier, start + cols, columns, GELU, SCALED)
        _store(h, hidden_inverse, hidden, start + cols, columns, QUANTIZE)
        _store(d_gate, inverse, out, start + cols, columns, QUANTIZE)
        _store(d_up, inverse, out + columns, start + cols, columns, QUANTIZE)


def forward(pair: Tensor, out: Tensor, scales: Tensor | None, gelu: bool) -> None:
    rows, columns = pair.shape[0], pair.shape[1] // 2
    block = min(_CHUNK, block_of(columns))
    launch(
        _gate_forward, (rows,),
        pair, out, out.stride(0), scales, columns,
        GELU=gelu, QUANTIZE=scales is not None, BLOCK=block,
        COUNT=ceil_div(columns, block) if columns <= _MAX_WHOLE_ROW else 0, num_warps=max(1, block // 128),
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
    constants = {"GELU": gelu, "SCALED": multiplier is not None, "QUANTIZE": scales is not None, "BLOCK": block}
    if columns > _MAX_WHOLE_ROW:
        launch(_gate_backward_chunks, (rows,), *tensors, columns, **constants, num_warps=row_warps(block))
        return
    count = ceil_div(columns, block)
    programs = 0 if multiplier is not None else _persistent_programs(g, pair, block * count)
    programs, stages = (min(programs, rows), _STAGES) if programs else (rows, 1)
    launch(
        _gate_backward, (programs,), *tensors, rows, columns, programs, **constants, COUNT=count, STAGES=stages,
        num_warps=max(1, block // 256),
    )  # fmt: skip


def _persistent_programs(g: Tensor, pair: Tensor, values: int) -> int:
    """Number of persistent backward programs that can run at once, each prefetching rows of `values` values.

    0 if shared memory is too small. (With multipliers it always is: they would be prefetched too.)
    """
    prefetch_bytes = (_STAGES - 1) * values * (g.element_size() + 2 * pair.element_size())
    sm_count, shared_memory = sm_limits(g.device)
    # the amax reduction needs a few bytes per warp; and registers hold one wide row, or two narrow ones
    return sm_count * min(shared_memory // (prefetch_bytes + 1024), max(1, _MAX_WHOLE_ROW // values))
