"""Dequantize mxfp4 weights, the format of gpt-oss's experts.

A weight is stored as 4-bit floats (e2m1), 32 of which share a power of two as their scale. Dequantized to bf16 they are
exact, and no kernel library is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pantheraml.base.errors import ModelError

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES_PER_SCALE = 32
_EXPONENT_BIAS = 127


def dequantized_shape(blocks: torch.Size) -> torch.Size:
    experts, rows, groups, size = blocks
    return torch.Size((experts, groups * size * 2, rows))


def dequantize_mxfp4(blocks: Tensor, scales: Tensor, *, where: str) -> Tensor:
    """Return the weight (experts, in, out) in bf16 from `blocks` (experts, out, groups, 16) and `scales` (experts, out,
    groups), expert by expert, so that little more memory is needed than for the result."""
    if (
        blocks.dtype != torch.uint8
        or scales.dtype != torch.uint8
        or blocks.ndim != 4
        or blocks.shape[-1] * 2 != _VALUES_PER_SCALE
        or blocks.shape[:-1] != scales.shape
    ):
        raise ModelError(
            f"An mxfp4 weight has blocks {tuple(blocks.shape)} and scales {tuple(scales.shape)}, which do not match.",
            where=where,
            fix="Download the model again.",
        )
    signed = [*_MAGNITUDES, *(-value for value in _MAGNITUDES)]
    values = torch.tensor(signed, dtype=torch.bfloat16, device=blocks.device)
    result = torch.empty(dequantized_shape(blocks.shape), dtype=torch.bfloat16, device=blocks.device)
    for expert, packed in enumerate(blocks):
        # the low four bits come first
        pairs = torch.stack((values[(packed & 0xF).int()], values[(packed >> 4).int()]), dim=-1)
        exponents = scales[expert].int() - _EXPONENT_BIAS
        dense = torch.ldexp(pairs.flatten(-2), exponents[..., None])
        result[expert] = dense.flatten(-2).T
    return result
