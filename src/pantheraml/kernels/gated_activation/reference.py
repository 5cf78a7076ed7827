"""Torch reference: activation(gate) * up, where `pair` is gate and up concatenated."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def reference_gated(pair: Tensor, *, gelu: bool = False) -> Tensor:
    """Output in float32."""
    gate, up = pair.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up


def reference_gated_backward(g: Tensor, pair: Tensor, *, gelu: bool = False) -> Tensor:
    """Gradient of `pair`, in float32."""
    with torch.enable_grad():
        leaf = pair.detach().float().requires_grad_()
        (gradient,) = torch.autograd.grad(reference_gated(leaf, gelu=gelu), leaf, g.float())
    return gradient
