"""The definition: the two halves of a head are the parts of a plane that turns with the position."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [tokens, heads, size] turned by cos and sin [tokens, size], in x's dtype."""
    low, high = x.float().chunk(2, dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    return (x.float() * cos.float()[:, None] + turned * sin.float()[:, None]).to(x.dtype)
