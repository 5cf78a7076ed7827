"""Coordinate descent over the weights of square tiles: each takes the value that makes a quadratic sum least.

With D for what rounding has added to a weight, that sum is tr(D X D^T) + tr(D^T G D) (see `models.quantise.rounding`),
and its slope D X + G D. A weight enters the slopes of its own row, through X, and of its own column, through G, so the
weights on a diagonal of a tile, from which no two share either, move at the same time.
"""

from __future__ import annotations

from torch import Tensor

from pantheraml.kernels.dispatch import runs_triton
from pantheraml.kernels.nf4_descent.reference import TILE, reference_descend

__all__ = ["TILE", "descend"]


def descend(
    codes: Tensor, slope: Tensor, scales: Tensor, curvature: Tensor, inputs: Tensor, gradients: Tensor
) -> Tensor:
    """The codes that the weights of the tiles take when each has moved once; all are [tiles, TILE, TILE].

    `codes` uint8 are those of nf4's levels, `scales` the magnitudes that these are multiplied by (nought: the weight
    stays), `slope` that of the sum, and `curvature`, which is above nought, what it grows by with a weight's square.
    `inputs` and `gradients` are the parts of X and G that belong to a tile's own columns and rows. All but codes are
    float32.
    """
    shape = (codes.shape[0], TILE, TILE)
    if any(part.shape != shape for part in (codes, slope, scales, curvature, inputs, gradients)):
        raise ValueError(f"tiles of {TILE} x {TILE} are expected, and as many of each")
    parts = (slope, scales, curvature, inputs, gradients)
    if not runs_triton(codes):
        return reference_descend(codes, *parts)
    from pantheraml.kernels.nf4_descent import triton_kernel

    return triton_kernel.descend(codes.contiguous(), *(part.contiguous() for part in parts))
