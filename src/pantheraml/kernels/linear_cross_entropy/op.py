"""Cross entropy of a linear head, token chunk by token chunk; nothing is left for the backward pass but to scale.

Tokens without a target (prompt, padding) are left out before the matrix product, unless they are few.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pantheraml.kernels.linear_cross_entropy.head import Call, LinearHead, apply_head, open_pass, put_back, scaled


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, target_count: int | None = None
) -> Tensor:
    """Sum of token losses (targets of -100 do not count); see `reference_linear_cross_entropy` for the definition.

    `target_count` is how many targets count. Without it the host must wait for the GPU to find out.
    """
    total: Tensor = apply_head(_LinearCrossEntropy, hidden, LinearHead(weight, bias), targets, target_count)
    return total


def fp8_linear_cross_entropy(
    hidden: Tensor, payload: Tensor, scale: Tensor, targets: Tensor, target_count: int | None = None
) -> Tensor:
    """The same for a frozen head in e4m3, [vocabulary, width] with one scale for all: both products run in fp8."""
    head = LinearHead(payload, scale=scale)
    total: Tensor = apply_head(_LinearCrossEntropy, hidden, head, targets, target_count)
    return total


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        run = open_pass(ctx, hidden, weight, bias, call)
        total = run.scores(details=False).losses.sum()
        ctx.save_for_backward(run.d_rows, run.d_weight, run.d_bias, run.rows.kept)
        ctx.count, ctx.dtypes = hidden.shape[0], (weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_rows, d_weight, d_bias, kept = ctx.saved_tensors
        (scale,) = grads
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            None if d_rows is None else put_back(scaled(d_rows, scale, d_rows.dtype), kept, ctx.count),
            None if d_weight is None else scaled(d_weight, scale, weight_dtype),
            None if d_bias is None else scaled(d_bias, scale, bias_dtype),
            None,
        )
