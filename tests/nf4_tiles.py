"""NF4 tiles for tests of coordinate descent, and the objective that rounding minimizes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pantheraml.kernels.nf4.descent import TILE, effective_weight
from pantheraml.kernels.nf4.format import levels_on


class Tiles(NamedTuple):
    codes: Tensor
    slope: Tensor
    scales: Tensor
    curvature: Tensor
    inputs: Tensor
    gradients: Tensor


def tiles(count: int = 2) -> Tiles:
    """Randomly rounded weights, some with a scale of zero, and moments that are far from diagonal."""
    torch.manual_seed(count)
    codes = torch.randint(0, 16, (count, TILE, TILE), dtype=torch.uint8)
    scales = (0.5 + torch.rand(count, TILE, 1)).expand(-1, -1, TILE).clone()
    scales[0, 3] = 0
    moments = []
    for _ in range(2):
        rows = torch.randn(count, 3 * TILE, TILE) @ (torch.eye(TILE) + 0.1 * torch.randn(TILE, TILE))
        moments.append(rows.mT @ rows / (3 * TILE))
    inputs, gradients = moments
    change = effective_weight(levels_on(codes.device)[codes.int()] * scales) - torch.randn(count, TILE, TILE) / 2
    curvature = inputs.diagonal(dim1=1, dim2=2)[:, None, :] + gradients.diagonal(dim1=1, dim2=2)[:, :, None]
    return Tiles(codes, change @ inputs + gradients @ change, scales, curvature, inputs, gradients)


def differing(one: Tensor, other: Tensor) -> float:
    return float((one != other).float().mean())


def problem(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, and moments of correlated inputs and gradients."""
    generator = torch.Generator().manual_seed(0)
    weight = 0.02 * torch.randn(rows, columns, generator=generator)
    inputs, gradients = (correlated(size, generator) for size in (columns, rows))
    return weight, inputs, gradients


def correlated(size: int, generator: torch.Generator) -> Tensor:
    mixing = torch.randn(size, size, generator=generator) * torch.linspace(1, 0.05, size)
    return mixing @ mixing.T


def changed(values: Tensor, weight: Tensor, inputs: Tensor, gradients: Tensor) -> float:
    """Objective of `values` as the rounded weight: the change of outputs and input gradients."""
    change = values - weight
    outputs = (change @ inputs * change).sum() / inputs.diagonal().mean()
    return float(outputs + (gradients @ change * change).sum() / gradients.diagonal().mean())
