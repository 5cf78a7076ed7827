"""Rotary position embedding on the merged output of the query, key and value products.

Queries, keys and values leave as tensors of their own: attention's backward pass is a tenth slower on views of the
merged matrix (cuDNN on an H200). The backward pass gathers the three gradients into one matrix: the input of the
product that takes them on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pantheraml.kernels.dispatch import runs_triton
from pantheraml.kernels.e4m3 import E4M3
from pantheraml.kernels.quantise_rows.reference import reference_quantise_rows
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


def unrotate_quantised(
    parts: tuple[Tensor, Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    *,
    room: int = 0,
    multiplier: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`unrotate` (times `multiplier` [columns]) as e4m3 [tokens, columns + room] and float32 scales [tokens].

    The room is not written. The matrix itself never exists: one launch instead of four, which took 108 us in
    Llama-3.1-8B's shape and 8,192 tokens, and takes 44 us (H200).
    """
    tokens, size = cos.shape
    columns = sum(part.shape[1] for part in parts) * size
    out = torch.empty(tokens, columns + room, dtype=E4M3, device=parts[0].device)
    if not runs_triton(out):
        out[:, :columns], scales = reference_quantise_rows(unrotate(parts, cos, sin), multiplier)
        return out, scales
    from pantheraml.kernels.rotary import triton_kernel

    scales = torch.empty(tokens, dtype=torch.float32, device=out.device)
    q, k, v = (part if part.stride(2) == 1 else part.contiguous() for part in parts)
    triton_kernel.turn_back_and_quantise((q, k, v), cos, sin, multiplier, out, scales)
    return out, scales
