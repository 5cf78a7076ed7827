"""The definition, in plain torch: also what runs on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from pantheraml.kernels.nf4 import levels_on, midpoints_on

TILE = 64


def as_multiplied(values: Tensor) -> Tensor:
    """What products make of float32 nf4 values. Those in 16 bits or more see them as they are; those in fp8 see the
    nearest of four significant bits, since scales are powers of two there. Midway between, both are as close."""
    bits = values.view(torch.int32)
    rounded = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF).view(torch.float32)
    return (values + rounded) * 0.5


def reference_descend(
    codes: Tensor, slope: Tensor, scales: Tensor, curvature: Tensor, inputs: Tensor, gradients: Tensor
) -> Tensor:
    levels, middles = levels_on(codes.device), midpoints_on(codes.device)
    codes, slope = codes.long(), slope.clone()
    row = torch.arange(TILE, device=codes.device)
    for shift in range(TILE):
        column = (row + shift) % TILE
        row_of = (row - shift) % TILE  # of the weight in each column
        old, scale = codes[:, row, column], scales[:, row, column]
        value = as_multiplied(levels[old] * scale)
        best = value - slope[:, row, column] / curvature[:, row, column]
        new = torch.bucketize(best / torch.where(scale > 0, scale, 1.0), middles)
        reached = as_multiplied(levels[new] * scale)
        better = ((reached - best).abs() < (value - best).abs()) & (scale > 0)
        new, step = torch.where(better, new, old), torch.where(better, reached - value, 0.0)
        codes[:, row, column] = new
        slope += step[:, :, None] * inputs[:, column]
        slope += step[:, None, row_of] * gradients[:, :, row_of]
    return codes.to(torch.uint8)
