"""Torch reference of linear cross entropy, with full logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def reference_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Sum over tokens with target >= 0 of -log softmax(hidden @ weight.T + bias)[target], in float32."""
    logits = F.linear(hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype))
    logits = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum")
