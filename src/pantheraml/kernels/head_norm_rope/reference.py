"""Torch reference of RMSNorm per head with RoPE, and of its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from pantheraml.kernels.fp8.e4m3 import MIN_SCALE
from pantheraml.kernels.rms_norm.reference import reference_rms_norm
from pantheraml.kernels.rotary.reference import reference_rope


def reference_head_norm_rope(
    x: Tensor, weight: Tensor, epsilon: float, cos: Tensor, sin: Tensor, *, plus_one: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the normalized and rotated heads [tokens, heads, size], and each head's inverse RMS [tokens, heads].

    The norm's output is rounded to x's dtype, as in the transformers modules.
    """
    normal, inverse = reference_rms_norm(x.reshape(-1, x.shape[-1]), weight, epsilon, plus_one=plus_one)
    return reference_rope(normal.view(x.shape), cos, sin), inverse.view(x.shape[:-1])


def reference_head_norm_rope_backward(
    g: Tensor, saved: Tensor, inverse: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, *, from_output: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the heads and of the weight, both in float32.

    `saved` is the input of the norm, or with `from_output` the rotated output. The table need not be orthogonal: it is
    rounded, and some models scale it.
    """
    g = reference_rope(g.float(), cos, -sin)
    if from_output:
        scale = (cos.float().square() + sin.float().square())[:, None]
        normal = reference_rope(saved.float(), cos, -sin) / scale / torch.where(gain.abs() < MIN_SCALE, 1.0, gain)
    else:
        normal = saved.float() * inverse[:, :, None]
    scaled = g * gain
    dx = inverse[:, :, None] * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    return dx, (g * normal).sum((0, 1))
