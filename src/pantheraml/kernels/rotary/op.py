"""Rotary position embedding on the merged output of the query, key and value products.

Queries, keys and values leave as tensors of their own: attention's backward pass is a tenth slower on views of the
merged matrix (cuDNN on an H200). The backward pass gathers the three gradients into one matrix: the input of the
product that takes them on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pantheraml.kernels.dispatch import runs_triton
from pantheraml.kernels.rotary.reference import reference_rotate


def rotate(merged: Tensor, cos: Tensor, sin: Tensor, *, heads: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """`merged` [tokens, all heads * size] as query, key and value [tokens, heads, size], the first two turned.

    cos and sin are [tokens, size], their two halves alike.
    """
    tokens, size = cos.shape
    parts = []
    start = 0
    for count, rotated in zip(heads, (True, True, False), strict=True):
        source = merged[:, start : start + count * size].unflatten(1, (count, size))
        start += count * size
        if not runs_triton(merged):
            parts.append(reference_rotate(source, cos, sin) if rotated else source.contiguous())
            continue
        from pantheraml.kernels.rotary import triton_kernel

        out = torch.empty(tokens, count, size, dtype=merged.dtype, device=merged.device)
        triton_kernel.turn(source, out.flatten(1), cos, sin, count if rotated else 0, back=False)
        parts.append(out)
    return parts[0], parts[1], parts[2]


def unrotate(parts: tuple[Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor) -> Tensor:
    """Gradients of query, key and value, each [tokens, heads, size], to the gradient of the merged matrix."""
    tokens, size = cos.shape
    widths = [part.shape[1] * size for part in parts]
    merged = torch.empty(tokens, sum(widths), dtype=parts[0].dtype, device=parts[0].device)
    start = 0
    for part, width, rotated in zip(parts, widths, (True, True, False), strict=True):
        out = merged[:, start : start + width]
        start += width
        if not runs_triton(merged):
            out.copy_((reference_rotate(part, cos, -sin) if rotated else part).flatten(1))
            continue
        from pantheraml.kernels.rotary import triton_kernel

        last = part if part.stride(2) == 1 else part.contiguous()
        triton_kernel.turn(last, out, cos, sin, part.shape[1] if rotated else 0, back=True)
    return merged
