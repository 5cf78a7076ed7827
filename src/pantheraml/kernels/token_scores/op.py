"""Log-probabilities of targets under a linear head, token by token, chunk by chunk.

For trainers that weigh tokens themselves or report accuracy and entropy, where a summed loss does not do. Gradients are
formed in the forward pass, while the logits are at hand; forming them in the backward pass would take one more product
with the vocabulary. The weight that the trainer gives to a token comes later, but only scales the gradient of that
token's hidden state. Of the head's own gradient it can be taken out if all tokens have the same weight, as in a mean;
if they have not, that gradient is formed anew.

A trainer that reads the scores keeps the GPU waiting until it has queued the backward pass. So the gradients of the
last tokens can be left for later (`Later`): once the scores are on their way to the host, they give the GPU work.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pantheraml.kernels.linear_cross_entropy.head import (
    Call,
    DensePass,
    LinearHead,
    Rows,
    apply_head,
    open_pass,
    put_back,
    scaled,
    taken,
)
from pantheraml.kernels.linear_cross_entropy.later import Later


class TokenScores(NamedTuple):
    """All of the targets' shape, and 0 where the target is negative; `log_probs` alone has a gradient."""

    log_probs: Tensor
    entropy: Tensor
    is_top1: Tensor


def token_scores(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, target_count: int | None = None
) -> TokenScores:
    """Scores of `targets` under softmax(hidden @ weight.T + bias); see `reference_token_scores` for the definition.

    `target_count` is how many targets count. Without it the host must wait for the GPU to find out.
    """
    return _shaped(hidden, LinearHead(weight, bias), targets, target_count)


def fp8_token_scores(
    hidden: Tensor,
    payload: Tensor,
    scale: Tensor,
    targets: Tensor,
    target_count: int | None = None,
    later: Later | None = None,
) -> TokenScores:
    """The same for a frozen head in e4m3, [vocabulary, width] with one scale for all: both products run in fp8.

    With `later` some of the gradients are formed when that is done, in the backward pass at the latest.
    """
    return _shaped(hidden, LinearHead(payload, scale=scale), targets, target_count, later)


def _shaped(
    hidden: Tensor, head: LinearHead, targets: Tensor, target_count: int | None, later: Later | None = None
) -> TokenScores:
    flat = apply_head(_TokenScores, hidden, head, targets, target_count, later)
    return TokenScores(*(scores.view(targets.shape) for scores in flat))


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        run = open_pass(ctx, hidden, weight, bias, call)
        rows, labels, kept = run.rows
        scores = run.scores(details=True)
        assert scores.details is not None
        again = (rows, labels, weight, bias) if run.wanted.weight or run.wanted.bias else (None,) * 4
        ctx.save_for_backward(run.d_rows, run.d_weight, run.d_bias, kept, *again)
        ctx.later = call.later
        ctx.wanted, ctx.dtypes = run.wanted, (weight.dtype, None if bias is None else bias.dtype)
        found = (scores.losses.neg_(), scores.details.entropy, scores.details.is_top1)
        log_probs, entropy, is_top1 = (put_back(one, kept, hidden.shape[0]) for one in found)
        ctx.mark_non_differentiable(entropy, is_top1)
        return log_probs, entropy, is_top1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_rows, d_weight, d_bias, kept, *_ = ctx.saved_tensors
        # What is at hand are gradients of losses, and a loss is minus a log-probability.
        by_token = -taken(grads[0], kept)
        d_hidden = None
        if d_rows is not None:
            later = None if ctx.later is None else ctx.later.rows()
            d_hidden = put_back(_weighted(d_rows, later, by_token), kept, grads[0].shape[0])
        if d_weight is not None or d_bias is not None:
            d_weight, d_bias = _head_gradient(ctx, by_token)
        return d_hidden, d_weight, d_bias, None


def _weighted(first: Tensor, later: Tensor | None, by_token: Tensor) -> Tensor:
    """Rows, each multiplied by its token's weight, and those that were left for later behind the others."""
    weights, dtype = by_token[:, None], first.dtype
    if later is None:
        return scaled(first, weights, dtype)
    both = first.new_empty(len(weights), *first.shape[1:])
    for rows, span in ((first, slice(len(first))), (later, slice(len(first), None))):
        scaled(rows, weights[span], dtype, out=both[span])
    return both


def _head_gradient(ctx: Any, by_token: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Of weight and bias, where they are trained, with each token's part multiplied by its weight."""
    _, d_weight, d_bias, _, rows, labels, weight, bias = ctx.saved_tensors
    weight_dtype, bias_dtype = ctx.dtypes
    counted = by_token[labels >= 0]
    if bool((counted == counted[:1]).all()):
        scale = counted[:1].sum()
        d_weight, d_bias = (None if d is None else d * scale for d in (d_weight, d_bias))
    else:
        wanted = ctx.wanted._replace(hidden=False)
        run = DensePass(Rows(rows, labels), LinearHead(weight, bias), wanted, by_token)
        run.scores(details=False)
        d_weight, d_bias = run.d_weight, run.d_bias
    return (
        None if d_weight is None else d_weight.to(weight_dtype),
        None if d_bias is None else d_bias.to(bias_dtype),
    )
