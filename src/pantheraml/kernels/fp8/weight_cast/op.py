"""Cast trainable weights to e4m3 every step: as stored for the forward pass, transposed for the backward pass.

All weights of one matmul share one scale, because the backward matmul sums over weight rows and cannot apply a scale
per row. The scale is a power of two, so the only error is e4m3's own rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pantheraml.kernels.dispatch import runs_triton
from pantheraml.kernels.fp8.weight_cast.reference import reference_weight_scale, reference_weight_to_e4m3


def weight_scales(weights: Sequence[Tensor], count: int) -> Tensor:
    """Shared scale of `weights` (bf16 or float32 matrices), repeated to [count] float32.

    It is the smallest power of two that maps all weights into e4m3's range; NaN if any weight is NaN.
    """
    if not runs_triton(weights[0]):
        return reference_weight_scale(weights).repeat(count)
    from pantheraml.kernels.fp8.weight_cast import triton_kernel

    out = torch.empty(count, dtype=torch.float32, device=weights[0].device)
    triton_kernel.scales([w if w.stride(1) == 1 else w.contiguous() for w in weights], out)
    return out


def weight_to_e4m3(weight: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write `weight` [rows, columns] divided by its scale to `out`, a slice of an e4m3 matrix or of its transpose."""
    if out.shape != weight.shape or 1 not in out.stride():
        raise ValueError(f"cannot write {tuple(weight.shape)} into {tuple(out.shape)} with strides {out.stride()}")
    if runs_triton(out):
        from pantheraml.kernels.fp8.weight_cast import triton_kernel

        if triton_kernel.can_write(weight, out):
            triton_kernel.write(weight, scales, out)
            return
    reference_weight_to_e4m3(weight, scales[0], out)
