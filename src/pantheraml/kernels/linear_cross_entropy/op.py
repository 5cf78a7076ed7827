"""Chunked cross entropy of a linear head. The forward pass computes the gradients; the backward pass only scales them.

Tokens without a target (prompt, padding) are dropped before the matmul, unless they are few.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pantheraml.kernels.linear_cross_entropy.head import (
    HeadCall,
    LinearHead,
    apply_head,
    make_pass,
    scale_gradient,
    scatter_rows,
)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, target_count: int | None = None
) -> Tensor:
    """Sum of token losses (targets of -100 are ignored); defined by `reference_linear_cross_entropy`.

    `target_count` is the number of targets. Without it, the host must synchronize with the GPU to count them.
    """
    total: Tensor = apply_head(_LinearCrossEntropy, hidden, LinearHead(weight, bias), targets, target_count)
    return total


def fp8_linear_cross_entropy(
    hidden: Tensor, qdata: Tensor, scale: Tensor, targets: Tensor, target_count: int | None = None
) -> Tensor:
    """`linear_cross_entropy` of a frozen e4m3 head [vocabulary, width] with one scale; both matmuls are fp8."""
    head = LinearHead(qdata, scale=scale)
    total: Tensor = apply_head(_LinearCrossEntropy, hidden, head, targets, target_count)
    return total


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: HeadCall) -> Tensor:
        head_pass = make_pass(ctx, hidden, weight, bias, call)
        total = head_pass.scores(details=False).losses.sum()
        ctx.save_for_backward(head_pass.d_rows, head_pass.d_weight, head_pass.d_bias, head_pass.rows.positions)
        ctx.count, ctx.dtypes = hidden.shape[0], (weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_rows, d_weight, d_bias, positions = ctx.saved_tensors
        (scale,) = grads
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            None if d_rows is None else scatter_rows(scale_gradient(d_rows, scale, d_rows.dtype), positions, ctx.count),
            None if d_weight is None else scale_gradient(d_weight, scale, weight_dtype),
            None if d_bias is None else scale_gradient(d_bias, scale, bias_dtype),
            None,
        )
