"""Torch reference of RoPE (half-split layout)."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to `x` [tokens, heads, size] with cos and sin [tokens, size], in x's dtype."""
    low, high = x.float().chunk(2, dim=-1)
    rotated_half = torch.cat((-high, low), dim=-1)
    return (x.float() * cos.float()[:, None] + rotated_half * sin.float()[:, None]).to(x.dtype)
