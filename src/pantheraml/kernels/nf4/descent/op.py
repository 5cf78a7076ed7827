"""Coordinate descent over square tiles of NF4 weights, minimizing a quadratic objective one weight at a time.

With D the rounding error of the weight, the objective is tr(D X D^T) + tr(D^T G D) (see `models.quantize.rounding`)
and its gradient ("slope") D X + G D. A weight affects the slopes of its row, through X, and of its column, through G.
So the weights on one (wrapped) diagonal of a tile, which share no row or column, are updated in parallel.
"""

from __future__ import annotations

from torch import Tensor

from pantheraml.kernels.dispatch import runs_triton
from pantheraml.kernels.nf4.descent.reference import TILE, reference_nf4_descent

__all__ = ["TILE", "nf4_descent"]


def nf4_descent(
    codes: Tensor, slope: Tensor, scales: Tensor, curvature: Tensor, inputs: Tensor, gradients: Tensor
) -> Tensor:
    """Return the codes after one pass over every weight of the tiles; all tensors are [tiles, TILE, TILE].

    `codes` (uint8) index the NF4 levels and `scales` multiply them (a weight with scale 0 is not changed). `slope` is
    the gradient of the objective and `curvature` (positive) its second derivative with respect to each weight. `inputs`
    and `gradients` are the tiles of X and G for the tile's own columns and rows. All but codes are float32.
    """
    shape = (codes.shape[0], TILE, TILE)
    if any(part.shape != shape for part in (codes, slope, scales, curvature, inputs, gradients)):
        raise ValueError(f"all tensors must have the shape [tiles, {TILE}, {TILE}], with the same number of tiles")
    parts = (slope, scales, curvature, inputs, gradients)
    if not runs_triton(codes):
        return reference_nf4_descent(codes, *parts)
    from pantheraml.kernels.nf4.descent import triton_kernel

    return triton_kernel.nf4_descent(codes.contiguous(), *(part.contiguous() for part in parts))
