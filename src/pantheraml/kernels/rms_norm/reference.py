"""The definition, with the roundings of the transformers modules."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_rms_norm(x: Tensor, weight: Tensor, epsilon: float, *, plus_one: bool = False) -> tuple[Tensor, Tensor]:
    """The normalised rows in x's dtype, and each row's inverse root mean square."""
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
    dx = inverse[:, None] * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    return (dx if residual is None else dx + residual.float()).to(x.dtype)
