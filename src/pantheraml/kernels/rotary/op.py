"""RoPE on the merged output of the query, key and value projections.

Queries, keys and values are returned as separate tensors, or as views of the merged matrix with RoPE applied in place.
cuDNN attention's backward pass is 10 % slower on views (H200); FlashAttention 4 is not, and views save copying the
values. The backward pass gathers the three gradients into one matrix, the operand of the projection's backward matmul.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pantheraml.kernels.dispatch import runs_triton
from pantheraml.kernels.fp8.e4m3 import E4M3
from pantheraml.kernels.fp8.quantize_rows.reference import reference_quantize_rows
from pantheraml.kernels.rotary.reference import reference_rope


def rope_forward(
    merged: Tensor, cos: Tensor, sin: Tensor, *, heads: tuple[int, int, int], in_place: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Split `merged` [tokens, all heads * size] into query, key and value [tokens, heads, size] and apply RoPE to query
    and key. With `in_place`, the results are views of `merged`.

    cos and sin are [tokens, size], with identical halves.
    """
    tokens, size = cos.shape
    q, k, v = merged.unflatten(1, (-1, size)).split(heads, dim=1)
    if not runs_triton(merged):
        rotated = reference_rope(q, cos, sin), reference_rope(k, cos, sin)
        return (q.copy_(rotated[0]), k.copy_(rotated[1]), v) if in_place else (*rotated, v.contiguous())
    from pantheraml.kernels.rotary import triton_kernel

    outs = [q, k, v]
    if not in_place:
        outs = [torch.empty(tokens, count, size, dtype=merged.dtype, device=merged.device) for count in heads]
    triton_kernel.rope((q, k, v), outs, cos, sin, backward=False)
    return outs[0], outs[1], outs[2]


def rope_backward(parts: tuple[Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor, *, pad_cols: int = 0) -> Tensor:
    """Gradient of the merged matrix [tokens, columns + pad_cols] from the gradients of query, key and value [tokens,
    heads, size].

    The padding is left uninitialized.
    """
    tokens, size = cos.shape
    heads = [part.shape[1] for part in parts]
    columns = sum(heads) * size
    merged = torch.empty(tokens, columns + pad_cols, dtype=parts[0].dtype, device=parts[0].device)
    q, k, v = parts
    if not runs_triton(merged):
        rotated = reference_rope(q, cos, -sin), reference_rope(k, cos, -sin), v
        merged[:, :columns] = torch.cat([part.flatten(1) for part in rotated], dim=1)
        return merged
    from pantheraml.kernels.rotary import triton_kernel

    sources = [part if part.stride(2) == 1 else part.contiguous() for part in parts]
    outs = merged[:, :columns].unflatten(1, (-1, size)).split(heads, dim=1)
    triton_kernel.rope(sources, outs, cos, sin, backward=True)
    return merged


def rope_backward_quantized(
    parts: tuple[Tensor, Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    *,
    pad_cols: int = 0,
    multiplier: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`rope_backward` (times `multiplier` [columns]), quantized to e4m3 [tokens, columns + pad_cols] with float32
    scales [tokens].

    The padding is left uninitialized. The unquantized matrix is never written: doing so and quantizing it afterwards
    took 108 us for Llama-3.1-8B's shape and 8,192 tokens; this takes 44 us (H200).
    """
    tokens, size = cos.shape
    columns = sum(part.shape[1] for part in parts) * size
    out = torch.empty(tokens, columns + pad_cols, dtype=E4M3, device=parts[0].device)
    if not runs_triton(out):
        out[:, :columns], scales = reference_quantize_rows(rope_backward(parts, cos, sin), multiplier)
        return out, scales
    from pantheraml.kernels.rotary import triton_kernel

    scales = torch.empty(tokens, dtype=torch.float32, device=out.device)
    q, k, v = (part if part.stride(2) == 1 else part.contiguous() for part in parts)
    triton_kernel.rope_backward_quantized((q, k, v), cos, sin, multiplier, out, scales)
    return out, scales
