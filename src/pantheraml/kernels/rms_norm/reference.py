"""Torch reference of RMSNorm, with the same rounding as the transformers modules."""

from __future__ import annotations

import torch
from torch import Tensor

from pantheraml.kernels.fp8.e4m3 import MIN_SCALE


def reference_rms_norm(x: Tensor, weight: Tensor, epsilon: float, *, plus_one: bool = False) -> tuple[Tensor, Tensor]:
    """Return the normalized rows in x's dtype and each row's inverse RMS."""
    wide = x.float()
    inverse = torch.rsqrt(wide.pow(2).mean(-1) + epsilon)
    normal = wide * inverse[:, None]
    if plus_one:
        return (normal * (1.0 + weight.float())).to(x.dtype), inverse
    return (normal.to(x.dtype).float() * weight.float()).to(x.dtype), inverse


def reference_rms_norm_backward(
    g: Tensor, x: Tensor, weight: Tensor, inverse: Tensor, *, plus_one: bool = False, residual: Tensor | None = None
) -> Tensor:
    normal = x.float() * inverse[:, None]
    scaled = g.float() * (weight.float() + (1.0 if plus_one else 0.0))
    return _gradient(g, scaled, normal, scaled * normal, inverse, residual)


def reference_rms_norm_backward_quantized(
    g: Tensor,
    qdata: Tensor,
    scales: Tensor,
    weight: Tensor,
    inverse: Tensor,
    *,
    plus_one: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """Input gradient from the e4m3 output (the first columns of `qdata`), which is divided by the weight again.

    Rounding at most doubles a value, however small, so the quotients are at most twice their true value. Where the
    weight is zero, so is the output, and the normalized input counts as zero.
    """
    gain = weight.float() + (1.0 if plus_one else 0.0)
    result = qdata[:, : g.shape[1]].float() * scales[:, None]
    normal = result / torch.where(gain.abs() < MIN_SCALE, 1.0, gain)
    return _gradient(g, g.float() * gain, normal, g.float() * result, inverse, residual)


def reference_rms_norm_weight_gradient(g: Tensor, x: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    return (g.float() * (x.float() * inverse[:, None])).sum(0).to(dtype)


def _gradient(
    g: Tensor, scaled: Tensor, normal: Tensor, weighted: Tensor, inverse: Tensor, residual: Tensor | None
) -> Tensor:
    dx = inverse[:, None] * (scaled - normal * weighted.mean(-1, keepdim=True))
    return (dx if residual is None else dx + residual.float()).to(g.dtype)
