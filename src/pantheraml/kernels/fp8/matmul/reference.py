"""Torch reference of the fp8 matmul and the byte transpose."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_fp8_matmul(left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor | None) -> Tensor:
    """Matmul of the dequantized operands, in float32."""
    result = (left.float() @ right.float().T) * left_scales[:, None]
    return result if right_scales is None else result * right_scales


def reference_transpose(source: Tensor) -> Tensor:
    return source.view(torch.uint8).T.contiguous().view(source.dtype)
