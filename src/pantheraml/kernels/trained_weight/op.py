"""Weights that change at every step, as e4m3 matrices: of the way forward, and transposed, of the way back.

All weights of a product share one scale, so that one matrix serves both directions whatever its rows are: the way back
sums over them. The scale is a power of two, so weights lose nothing but what e4m3 cannot hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pantheraml.kernels.dispatch import runs_triton
from pantheraml.kernels.trained_weight.reference import reference_weight_scale, reference_weight_to_e4m3


def weight_scales(weights: Sequence[Tensor], count: int) -> Tensor:
    """[count] float32, all one number: the smallest power of two that brings `weights` within e4m3's range. NaN if a
    weight is. Weights are matrices in bf16 or float32."""
    if not runs_triton(weights[0]):
        return reference_weight_scale(weights).repeat(count)
    from pantheraml.kernels.trained_weight import triton_kernel

    out = torch.empty(count, dtype=torch.float32, device=weights[0].device)
    triton_kernel.scales([w if w.stride(1) == 1 else w.contiguous() for w in weights], out)
    return out


def weight_to_e4m3(weight: Tensor, scales: Tensor, out: Tensor) -> None:
    """`weight` [rows, columns] over the number in `scales`, into `out` of that shape: a part of a matrix, or of a
    transposed one."""
    if out.shape != weight.shape or 1 not in out.stride():
        raise ValueError(f"cannot write {tuple(weight.shape)} into {tuple(out.shape)} with strides {out.stride()}")
    if runs_triton(out):
        from pantheraml.kernels.trained_weight import triton_kernel

        if triton_kernel.fits(weight, out):
            triton_kernel.write(weight, scales, out)
            return
    reference_weight_to_e4m3(weight, scales[0], out)
