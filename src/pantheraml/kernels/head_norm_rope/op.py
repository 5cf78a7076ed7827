"""RMSNorm of every query and key head, followed by RoPE, on the merged output of the QKV projection.

Qwen3 and Gemma 3 normalize each head before RoPE. In plain torch that is a dozen passes over memory, most in float32,
which also keep their intermediate results for backward: 90 ms of a step of 274 ms and 12 GiB for Qwen3-4B's shape and
8,192 tokens (H200). Here it is one pass each way.

Backward needs the normalized heads. They follow from the output, which attention saves anyway, so that nothing but each
head's inverse RMS is saved: RoPE is undone, and the result is divided by the weight. Where a weight is much smaller
than that of the column it is rotated with, rounding of the output hides it; `output_determines_input` tells, and
then the input is kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pantheraml.kernels.dispatch import runs_triton
from pantheraml.kernels.fp8.e4m3 import E4M3
from pantheraml.kernels.fp8.quantize_rows.reference import reference_quantize_rows
from pantheraml.kernels.head_norm_rope.reference import reference_head_norm_rope, reference_head_norm_rope_backward

MAX_AMPLIFICATION = 8.0
"""Bound of `output_determines_input`. bf16 rounds by at most 2**-9, so the error of the gradient is below 1.6 % in the
worst case, where it is parallel to the head, and below 0.2 % typically; e4m3 rounds the same gradient by 3 %."""


class HeadNorms(NamedTuple):
    query: Tensor
    """Weight [size]."""
    key: Tensor
    epsilon: float
    plus_one: bool
    """The norms multiply by 1 + weight."""

    def gain(self, weight: Tensor) -> Tensor:
        return weight.float() + (1.0 if self.plus_one else 0.0)


class AttentionHeads(NamedTuple):
    """Query, key and value [tokens, heads, size], and what backward needs."""

    query: Tensor
    key: Tensor
    value: Tensor
    saved: tuple[Tensor, Tensor]
    """Query and key before the norm if that was to be kept, else those above."""
    inverse: Tensor
    """Inverse RMS of each query and key head [tokens, heads]."""


class HeadGradient(NamedTuple):
    rows: Tensor
    """Gradient of the merged matrix, [tokens, columns + pad_cols]; the padding is uninitialized."""
    scales: Tensor | None
    """Row scales of e4m3 rows."""
    weights: tuple[Tensor, Tensor] | None
    """Gradients of the two weights in float32."""


def output_determines_input(gain: Tensor) -> bool:
    """Return whether backward is accurate from the output: no gain is small beside that of its partner in RoPE.

    Rounding errors of a column are multiplied by that ratio; the bound is on its root mean square. Syncs.
    """
    low, high = gain.float().square().chunk(2)
    total = low + high
    amplification = torch.cat((total / low, total / high)).mean().sqrt()
    return bool(amplification <= MAX_AMPLIFICATION)  # False for NaN: a gain is zero


def head_norm_rope(
    merged: Tensor,
    norms: HeadNorms,
    cos: Tensor,
    sin: Tensor,
    *,
    heads: tuple[int, int, int],
    keep_input: tuple[bool, bool] = (False, False),
    in_place: bool = False,
) -> AttentionHeads:
    """Split `merged` [tokens, all heads * size] into query, key and value; normalize and rotate query and key.

    With `in_place`, the results are views of `merged`, except for query or key whose input is to be kept. cos and sin
    are [tokens, size], with identical halves.
    """
    tokens, size = cos.shape
    inputs = merged.unflatten(1, (-1, size)).split(heads, dim=1)
    writes_over = in_place and not keep_input[0], in_place and not keep_input[1], in_place
    outs = [
        source if over else torch.empty(source.shape, dtype=source.dtype, device=source.device)
        for source, over in zip(inputs, writes_over, strict=True)
    ]
    inverse = torch.empty(tokens, heads[0] + heads[1], dtype=torch.float32, device=merged.device)
    if not runs_triton(merged):
        inverses = inverse.split(heads[:2], dim=1)
        for source, weight, out, into in zip(inputs, norms[:2], outs, inverses, strict=False):
            rotated, own = reference_head_norm_rope(source, weight, norms.epsilon, cos, sin, plus_one=norms.plus_one)
            out.copy_(rotated)
            into.copy_(own)
        if not in_place:
            outs[2].copy_(inputs[2])
    else:
        from pantheraml.kernels.head_norm_rope import triton_kernel

        triton_kernel.forward(inputs, outs, inverse, norms, cos, sin)
    saved = [source if keep else out for source, out, keep in zip(inputs, outs, keep_input, strict=False)]
    return AttentionHeads(outs[0], outs[1], outs[2], (saved[0], saved[1]), inverse)


def head_norm_rope_backward(
    parts: tuple[Tensor, Tensor, Tensor],
    saved: tuple[Tensor, Tensor],
    inverse: Tensor,
    norms: HeadNorms,
    cos: Tensor,
    sin: Tensor,
    *,
    kept_input: tuple[bool, bool] = (False, False),
    quantize: bool = False,
    pad_cols: int = 0,
    multiplier: Tensor | None = None,
    weights: bool = False,
) -> HeadGradient:
    """Gradient of the merged matrix from `parts`, the gradients of query, key and value [tokens, heads, size].

    `saved` are the tensors of `AttentionHeads`. With `quantize`, rows (times `multiplier` [columns]) are e4m3.
    `weights`: also return the gradients of the weights, for which the inputs must have been kept.
    """
    if weights and not all(kept_input):
        raise ValueError("the gradients of the weights need the norms' inputs")
    tokens, size = cos.shape
    columns = sum(part.shape[1] for part in parts) * size
    dtype = E4M3 if quantize else parts[0].dtype
    rows = torch.empty(tokens, columns + pad_cols, dtype=dtype, device=parts[0].device)
    if not runs_triton(rows):
        return _reference_backward(parts, saved, inverse, norms, cos, sin, kept_input, rows, multiplier, weights)
    from pantheraml.kernels.head_norm_rope import triton_kernel

    scales = torch.empty(tokens, dtype=torch.float32, device=rows.device) if quantize else None
    sums = torch.empty(tokens, 2, size, dtype=torch.float32, device=rows.device) if weights else None
    sources = tuple(part if part.stride(2) == 1 else part.contiguous() for part in parts)
    out = triton_kernel.GradientRows(rows, multiplier if quantize else None, scales, sums)
    triton_kernel.backward(sources, saved, inverse, norms, cos, sin, kept_input, out)
    gradients = None
    if sums is not None:
        query, key = sums.sum(0)
        gradients = query, key
    return HeadGradient(rows, scales, gradients)


def _reference_backward(
    parts: tuple[Tensor, Tensor, Tensor],
    saved: tuple[Tensor, Tensor],
    inverse: Tensor,
    norms: HeadNorms,
    cos: Tensor,
    sin: Tensor,
    kept_input: tuple[bool, bool],
    rows: Tensor,
    multiplier: Tensor | None,
    weights: bool,
) -> HeadGradient:
    inverses = inverse.split([part.shape[1] for part in parts[:2]], dim=1)
    gradients = [
        reference_head_norm_rope_backward(g, x, own, norms.gain(weight), cos, sin, from_output=not kept)
        for g, x, own, weight, kept in zip(parts[:2], saved, inverses, norms[:2], kept_input, strict=True)
    ]
    merged = torch.cat([part.flatten(1) for part in (gradients[0][0], gradients[1][0], parts[2].float())], dim=1)
    scales = None
    if rows.dtype == E4M3:
        rows[:, : merged.shape[1]], scales = reference_quantize_rows(merged, multiplier)
    else:
        rows[:, : merged.shape[1]] = merged
    return HeadGradient(rows, scales, (gradients[0][1], gradients[1][1]) if weights else None)
