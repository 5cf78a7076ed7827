"""Per-token log-probabilities of targets under a linear head, in chunks.

For trainers that weight tokens themselves or report accuracy and entropy, where a summed loss is not enough. Gradients
are computed in the forward pass while the logits are available; the backward pass would need one more matmul with the
vocabulary. A token's weight is only known in the backward pass, but it just scales the gradient of that token's hidden
state. The head's own gradient can be scaled as a whole if all tokens have the same weight, as in a mean; otherwise it
is recomputed.

A trainer that reads the scores leaves the GPU idle until it has queued the backward pass. So the gradients of the last
tokens can be deferred (`DeferredGrad`), to give the GPU work while the scores are copied to the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pantheraml.kernels.linear_cross_entropy.deferred_grad import DeferredGrad
from pantheraml.kernels.linear_cross_entropy.head import (
    DensePass,
    HeadCall,
    HeadRows,
    LinearHead,
    apply_head,
    make_pass,
    scale_gradient,
    scatter_rows,
    select_rows,
)


class TokenScores(NamedTuple):
    """Tensors of the targets' shape, 0 where the target is negative. Only `log_probs` is differentiable."""

    log_probs: Tensor
    entropy: Tensor
    is_top1: Tensor
    mean_logits: Tensor


def token_scores(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, target_count: int | None = None
) -> TokenScores:
    """Scores of `targets` under softmax(hidden @ weight.T + bias); defined by `reference_token_scores`.

    `target_count` is the number of targets. Without it, the host must synchronize with the GPU to count them.
    """
    return _scores_like_targets(hidden, LinearHead(weight, bias), targets, target_count)


def fp8_token_scores(
    hidden: Tensor,
    qdata: Tensor,
    scale: Tensor,
    targets: Tensor,
    target_count: int | None = None,
    deferred: DeferredGrad | None = None,
) -> TokenScores:
    """`token_scores` of a frozen e4m3 head [vocabulary, width] with a per-tensor scale; both matmuls are fp8.

    With `deferred`, some gradients are computed when `deferred.rows` is called, at the latest in the backward pass.
    """
    return _scores_like_targets(hidden, LinearHead(qdata, scale=scale), targets, target_count, deferred)


def _scores_like_targets(
    hidden: Tensor, head: LinearHead, targets: Tensor, target_count: int | None, deferred: DeferredGrad | None = None
) -> TokenScores:
    flat = apply_head(_TokenScores, hidden, head, targets, target_count, deferred)
    return TokenScores(*(scores.view(targets.shape) for scores in flat))


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: HeadCall) -> tuple[Tensor, ...]:
        head_pass = make_pass(ctx, hidden, weight, bias, call)
        rows, labels, positions = head_pass.rows
        scores = head_pass.scores(details=True)
        assert scores.details is not None
        saved_for_head = (
            (rows, labels, weight, bias) if head_pass.needed.weight or head_pass.needed.bias else (None,) * 4
        )
        ctx.save_for_backward(head_pass.d_rows, head_pass.d_weight, head_pass.d_bias, positions, *saved_for_head)
        ctx.deferred = call.deferred
        ctx.needed, ctx.dtypes = head_pass.needed, (weight.dtype, None if bias is None else bias.dtype)
        columns = (scores.losses.neg_(), *scores.details.columns())
        log_probs, *metrics = (scatter_rows(column, positions, hidden.shape[0]) for column in columns)
        ctx.mark_non_differentiable(*metrics)
        return log_probs, *metrics

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_rows, d_weight, d_bias, positions, *_ = ctx.saved_tensors
        # The stored gradients are of losses, and a loss is the negative log-probability.
        token_weights = -select_rows(grads[0], positions)
        d_hidden = None
        if d_rows is not None:
            deferred = None if ctx.deferred is None else ctx.deferred.rows()
            d_hidden = scatter_rows(_apply_token_weights(d_rows, deferred, token_weights), positions, grads[0].shape[0])
        if d_weight is not None or d_bias is not None:
            d_weight, d_bias = _head_gradient(ctx, token_weights)
        return d_hidden, d_weight, d_bias, None


def _apply_token_weights(first: Tensor, deferred: Tensor | None, token_weights: Tensor) -> Tensor:
    """Multiply each row by its token's weight and append the deferred rows."""
    weights, dtype = token_weights[:, None], first.dtype
    if deferred is None:
        return scale_gradient(first, weights, dtype)
    d_hidden = first.new_empty(len(weights), *first.shape[1:])
    for rows, rows_slice in ((first, slice(len(first))), (deferred, slice(len(first), None))):
        scale_gradient(rows, weights[rows_slice], dtype, out=d_hidden[rows_slice])
    return d_hidden


def _head_gradient(ctx: Any, token_weights: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of weight and bias (if trainable), with each token's contribution multiplied by its weight."""
    _, d_weight, d_bias, _, rows, labels, weight, bias = ctx.saved_tensors
    weight_dtype, bias_dtype = ctx.dtypes
    target_weights = token_weights[labels >= 0]
    if bool((target_weights == target_weights[:1]).all()):
        scale = target_weights[:1].sum()
        d_weight, d_bias = (None if d is None else d * scale for d in (d_weight, d_bias))
    else:
        needed = ctx.needed._replace(hidden=False)
        head_pass = DensePass(HeadRows(rows, labels), LinearHead(weight, bias), needed, token_weights)
        head_pass.scores(details=False)
        d_weight, d_bias = head_pass.d_weight, head_pass.d_bias
    return (
        None if d_weight is None else d_weight.to(weight_dtype),
        None if d_bias is None else d_bias.to(bias_dtype),
    )
