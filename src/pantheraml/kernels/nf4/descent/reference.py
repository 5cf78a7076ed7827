"""Torch reference of NF4 coordinate descent, also used on CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from pantheraml.kernels.nf4.format import levels_on, midpoints_on

TILE = 64


def effective_weight(values: Tensor) -> Tensor:
    """Weight value to optimize for: the mean of the exact NF4 value and its e4m3 rounding.

    Matmuls in 16 bits or more use the exact value; fp8 matmuls use it rounded to four significant bits (their scales
    are powers of two). The mean is equally close to both.
    """
    bits = values.view(torch.int32)
    rounded = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF).view(torch.float32)
    return (values + rounded) * 0.5


def reference_nf4_descent(
    codes: Tensor, slope: Tensor, scales: Tensor, curvature: Tensor, inputs: Tensor, gradients: Tensor
) -> Tensor:
    levels, midpoints = levels_on(codes.device), midpoints_on(codes.device)
    codes, slope = codes.long(), slope.clone()
    row = torch.arange(TILE, device=codes.device)
    for shift in range(TILE):
        column = (row + shift) % TILE
        row_of_column = (row - shift) % TILE  # row of the diagonal's weight in each column
        old, scale = codes[:, row, column], scales[:, row, column]
        old_value = effective_weight(levels[old] * scale)
        target = old_value - slope[:, row, column] / curvature[:, row, column]
        new = torch.bucketize(target / torch.where(scale > 0, scale, 1.0), midpoints)
        new_value = effective_weight(levels[new] * scale)
        improved = ((new_value - target).abs() < (old_value - target).abs()) & (scale > 0)
        new, step = torch.where(improved, new, old), torch.where(improved, new_value - old_value, 0.0)
        codes[:, row, column] = new
        slope += step[:, :, None] * inputs[:, column]
        slope += step[:, None, row_of_column] * gradients[:, :, row_of_column]
    return codes.to(torch.uint8)
