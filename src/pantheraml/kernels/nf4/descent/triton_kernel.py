"""One program per tile. The tile stays in registers; X and G are reloaded from cache for every diagonal, since their
rows and columns are needed in a different order each time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.nf4.descent.reference import TILE
from pantheraml.kernels.nf4.format import levels_on, midpoints_on
from pantheraml.kernels.triton_support import launch


@triton.jit
def _effective_weight(values):
    bits = values.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF
    return (values + rounded.to(tl.float32, bitcast=True)) * 0.5


@triton.jit
def _nf4_descent(codes, slope, scales, curvature, inputs, gradients, levels, midpoints, out, T: tl.constexpr):
    row = tl.arange(0, T)
    column = tl.arange(0, T)
    tile = tl.program_id(0).to(tl.int64) * T * T
    offsets = row[:, None] * T + column[None, :]
    code = tl.load(codes + tile + offsets).to(tl.int32)
    slopes = tl.load(slope + tile + offsets)
    all_scales = tl.load(scales + tile + offsets)
    curvatures = tl.load(curvature + tile + offsets)
    for shift in range(T):
        on_diagonal = column[None, :] == ((row + shift) % T)[:, None]
        old = tl.sum(tl.where(on_diagonal, code, 0), 1)
        scale = tl.sum(tl.where(on_diagonal, all_scales, 0.0), 1)
        old_value = _effective_weight(tl.load(levels + old) * scale)
        target = old_value - tl.sum(tl.where(on_diagonal, slopes, 0.0), 1) / tl.sum(
            tl.where(on_diagonal, curvatures, 0.0), 1
        )
        ratio = target / tl.where(scale > 0, scale, 1.0)
        new = tl.zeros_like(old)
        for level in range(15):
            new += (tl.load(midpoints + level) < ratio).to(tl.int32)
        new_value = _effective_weight(tl.load(levels + new) * scale)
        improved = (tl.abs(new_value - target) < tl.abs(old_value - target)) & (scale > 0)
        new = tl.where(improved, new, old)
        step = tl.where(improved, new_value - old_value, 0.0)
        code = tl.where(on_diagonal, new[:, None], code)
        input_rows = tl.load(inputs + tile + ((row + shift) % T)[:, None] * T + column[None, :])
        slopes += step[:, None] * input_rows
        column_step = tl.sum(tl.where(on_diagonal, step[:, None], 0.0), 0)
        gradient_columns = tl.load(gradients + tile + row[:, None] * T + ((column - shift + T) % T)[None, :])
        slopes += column_step[None, :] * gradient_columns
    tl.store(out + tile + offsets, code.to(tl.uint8))


def nf4_descent(
    codes: Tensor, slope: Tensor, scales: Tensor, curvature: Tensor, inputs: Tensor, gradients: Tensor
) -> Tensor:
    out, device = torch.empty_like(codes), codes.device
    launch(
        _nf4_descent, (codes.shape[0],), codes, slope, scales, curvature, inputs, gradients, levels_on(device),
        midpoints_on(device), out, T=TILE, num_warps=8,
    )  # fmt: skip
    return out
