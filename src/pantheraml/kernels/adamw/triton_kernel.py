"""AdamW step as one Triton kernel per parameter; defined by `reference.py`.

Everything happens in registers: gradients are read once (clipping is a factor applied on load), parameter and moments
are read and written once, and no tensor is allocated. 8-bit moments are decoded, updated and encoded in the same pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.adamw.reference import BLOCK, FIRST_BITS, ROOT_BITS, AdamWStep, Moments8bit
from pantheraml.kernels.triton_support import ceil_div

ELEMENTS = 1024
"""Elements per program."""
ROWS = ELEMENTS // BLOCK


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _store(pointer, offsets, values, noise, mask):
    """Store float32 unchanged, and bf16 with stochastic rounding."""
    if pointer.dtype.element_ty == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True) + noise
        values = (bits & 0xFFFF0000).to(tl.float32, bitcast=True).to(tl.bfloat16)
    tl.store(pointer + offsets, values, mask=mask)


@triton.jit
def _update(p, g, m, v, factor, decay, step_size, beta1, one_minus_beta1, beta2, one_minus_beta2, root_factor, eps):
    g = g * factor
    m = m * beta1 + g * one_minus_beta1
    v = v * beta2 + g * g * one_minus_beta2
    root = tl.sqrt_rn(v)
    return p * decay - m / (root * root_factor + eps) * step_size, m, v, root


@triton.jit(do_not_specialize=["key"])
def _adamw_kernel(
    parameter, gradient, first, second, length, key,
    factor, decay, step_size, beta1, one_minus_beta1, beta2, one_minus_beta2, root_factor, eps,
    ELEMENTS: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = offsets < length
    p = tl.load(parameter + offsets, mask=mask, other=0).to(tl.float32)
    g = tl.load(gradient + offsets, mask=mask, other=0).to(tl.float32)
    m = tl.load(first + offsets, mask=mask, other=0).to(tl.float32)
    v = tl.load(second + offsets, mask=mask, other=0).to(tl.float32)
    p, m, v, _ = _update(
        p, g, m, v, factor, decay, step_size, beta1, one_minus_beta1, beta2, one_minus_beta2, root_factor, eps
    )
    word = _mix(offsets.to(tl.uint32) ^ key.to(tl.uint32))
    _store(parameter, offsets, p, word >> 16, mask)
    _store(first, offsets, m, word & 0xFFFF, mask)
    _store(second, offsets, v, _mix(word) >> 16, mask)


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _decode(cells, BITS: tl.constexpr):
    """Midpoint of a cell. Range d has 2**d cells, the first of which has index 2**d."""
    number = cells.to(tl.float32)
    d = (number.to(tl.int32, bitcast=True) >> 23) - 127  # -127 for zero, whose value is replaced below
    d = tl.maximum(d, 0)
    inside = (number + 0.5) * _power_of_two(-d) - 1
    value = (1 + 7 * inside) * _power_of_two(3 * (d - BITS))
    value = tl.where(cells == (1 << BITS) - 1, 1.0, value)
    return tl.where(cells == 0, 0.0, value)


@triton.jit
def _encode(ratios, BITS: tl.constexpr):
    """Cell index of ratios to the block's absmax, in [0, 1]; 0 below the lowest cell."""
    exponent = (ratios.to(tl.int32, bitcast=True) >> 23) - 127
    d = tl.minimum(tl.maximum(exponent + 3 * BITS, 0) // 3, BITS - 1)
    cells = 1 << d  # number of cells in range d, and the index of its first cell
    inside = (ratios * _power_of_two(3 * (BITS - d)) - 1) * cells.to(tl.float32)
    inside = tl.minimum((inside * (1.0 / 7.0)).to(tl.int32), cells - 1)
    return tl.where(exponent < -3 * BITS, 0, cells + inside)


@triton.jit(do_not_specialize=["key"])
def _adamw8bit_kernel(
    parameter, gradient, first, first_scale, root, root_scale, length, blocks, key,
    factor, decay, step_size, beta1, one_minus_beta1, beta2, one_minus_beta2, root_factor, eps,
    FIRST_BITS: tl.constexpr, ROOT_BITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offsets = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask, row_mask = offsets < length, rows < blocks
    p = tl.load(parameter + offsets, mask=mask, other=0).to(tl.float32)
    g = tl.load(gradient + offsets, mask=mask, other=0).to(tl.float32)
    code = tl.load(first + offsets, mask=row_mask[:, None], other=0).to(tl.int32)
    m = _decode(code & ((1 << FIRST_BITS) - 1), FIRST_BITS)
    m = tl.where((code >> FIRST_BITS) == 0, m, -m) * tl.load(first_scale + rows, mask=row_mask, other=0)[:, None]
    code = tl.load(root + offsets, mask=row_mask[:, None], other=0).to(tl.int32)
    v = _decode(code, ROOT_BITS) * tl.load(root_scale + rows, mask=row_mask, other=0)[:, None]
    p, m, _, root_moment = _update(
        p, g, m, v * v, factor, decay, step_size, beta1, one_minus_beta1, beta2, one_minus_beta2, root_factor, eps
    )

    word = _mix(offsets.to(tl.uint32) ^ key.to(tl.uint32))
    _store(parameter, offsets, p, word >> 16, mask)

    smallest = 1.1754943508222875e-38
    scale = tl.max(tl.abs(m), axis=1)
    cells = _encode(tl.abs(m) * tl.div_rn(1.0, tl.maximum(scale, smallest))[:, None], FIRST_BITS)
    tl.store(first + offsets, cells + ((m < 0).to(tl.int32) << FIRST_BITS), mask=row_mask[:, None])
    tl.store(first_scale + rows, scale, mask=row_mask)
    scale = tl.max(root_moment, axis=1)
    ratios = root_moment * tl.div_rn(1.0, tl.maximum(scale, smallest))[:, None]
    cells = tl.maximum(_encode(ratios, ROOT_BITS), (ratios > 0).to(tl.int32))
    tl.store(root + offsets, cells, mask=row_mask[:, None])
    tl.store(root_scale + rows, scale, mask=row_mask)


def _scalars(step: AdamWStep) -> tuple[float, ...]:
    """Scalar kernel arguments. 1 - beta is computed in double precision: in float32, 1 - 0.999 is off by 10**-5."""
    return (
        *(step.gradient_factor, step.decay, step.step_size),
        *(step.beta1, 1 - step.beta1, step.beta2, 1 - step.beta2),
        *(step.root_factor, step.eps),
    )


def step(parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor, numbers: AdamWStep) -> None:
    """Run `reference_adamw_` as one kernel."""
    length = parameter.numel()
    grid = (ceil_div(length, ELEMENTS),)
    with torch.cuda.device_of(parameter):
        _adamw_kernel[grid](
            parameter, gradient, first, second, length, numbers.key, *_scalars(numbers), ELEMENTS=ELEMENTS, num_warps=4
        )


def step_8bit(parameter: Tensor, gradient: Tensor, moments: Moments8bit, numbers: AdamWStep) -> None:
    """Run `reference_adamw8bit_` as one kernel."""
    blocks = moments.first_scale.numel()
    with torch.cuda.device_of(parameter):
        _adamw8bit_kernel[(ceil_div(blocks, ROWS),)](
            parameter, gradient, *moments, parameter.numel(), blocks, numbers.key, *_scalars(numbers),
            FIRST_BITS=FIRST_BITS, ROOT_BITS=ROOT_BITS, ROWS=ROWS, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
