"""The definition."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_product(left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor | None) -> Tensor:
    """In float32: what the dequantised values give."""
    product = (left.float() @ right.float().T) * left_scales[:, None]
    return product if right_scales is None else product * right_scales


def reference_transpose(source: Tensor) -> Tensor:
    return source.view(torch.uint8).T.contiguous().view(source.dtype)
