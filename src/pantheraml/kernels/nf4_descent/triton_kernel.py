"""One program takes one tile. It stays in registers but for X and G, whose rows and columns come in another order with
every diagonal, out of the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.nf4 import levels_on, midpoints_on
from pantheraml.kernels.nf4_descent.reference import TILE
from pantheraml.kernels.triton_support import launch


@triton.jit
def _as_multiplied(values):
    bits = values.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF
    return (values + rounded.to(tl.float32, bitcast=True)) * 0.5


@triton.jit
def _descend(codes, slope, scales, curvature, inputs, gradients, levels, middles, out, T: tl.constexpr):
    row = tl.arange(0, T)
    column = tl.arange(0, T)
    tile = tl.program_id(0).to(tl.int64) * T * T
    at = row[:, None] * T + column[None, :]
    code = tl.load(codes + tile + at).to(tl.int32)
    slopes = tl.load(slope + tile + at)
    all_scales = tl.load(scales + tile + at)
    curvatures = tl.load(curvature + tile + at)
    for shift in range(T):
        here = column[None, :] == ((row + shift) % T)[:, None]
        old = tl.sum(tl.where(here, code, 0), 1)
        scale = tl.sum(tl.where(here, all_scales, 0.0), 1)
        value = _as_multiplied(tl.load(levels + old) * scale)
        best = value - tl.sum(tl.where(here, slopes, 0.0), 1) / tl.sum(tl.where(here, curvatures, 0.0), 1)
        ratio = best / tl.where(scale > 0, scale, 1.0)
        new = tl.zeros_like(old)
        for level in range(15):
            new += (tl.load(middles + level) < ratio).to(tl.int32)
        reached = _as_multiplied(tl.load(levels + new) * scale)
        better = (tl.abs(reached - best) < tl.abs(value - best)) & (scale > 0)
        new = tl.where(better, new, old)
        step = tl.where(better, reached - value, 0.0)
        code = tl.where(here, new[:, None], code)
        along = tl.load(inputs + tile + ((row + shift) % T)[:, None] * T + column[None, :])
        slopes += step[:, None] * along
        of_column = tl.sum(tl.where(here, step[:, None], 0.0), 0)
        across = tl.load(gradients + tile + row[:, None] * T + ((column - shift + T) % T)[None, :])
        slopes += of_column[None, :] * across
    tl.store(out + tile + at, code.to(tl.uint8))


def descend(
    codes: Tensor, slope: Tensor, scales: Tensor, curvature: Tensor, inputs: Tensor, gradients: Tensor
) -> Tensor:
    out, device = torch.empty_like(codes), codes.device
    launch(
        _descend, (codes.shape[0],), codes, slope, scales, curvature, inputs, gradients, levels_on(device),
        midpoints_on(device), out, T=TILE, num_warps=8,
    )  # fmt: skip
    return out
