"""Cross entropy of a linear head, token chunk by token chunk.

With a vocabulary of 128k, the float32 logits of 8,192 tokens take 4.2 GB, and their gradient as much again; here only
one chunk of them exists at a time. The gradient is formed in the forward pass, while a chunk's logits are at hand, so
nothing is computed twice. Tokens without a target (prompt, padding) are left out before the matrix product.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Elements of one float32 logits chunk: 2**25 is 128 MiB, large enough to keep an H200's matrix units busy.
CHUNK_ELEMENTS = 2**25


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None) -> Tensor:
    """Sum of token losses (targets of -100 do not count); see `reference_linear_cross_entropy` for the definition."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    with torch.autocast(kind, enabled=False):  # the op chooses its own dtypes
        wanted = torch.is_grad_enabled()  # a Function cannot tell: inside it gradients are always off
        result: Tensor = _LinearCrossEntropy.apply(hidden.flatten(0, -2), weight, targets.flatten(), bias, wanted)
    return result


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, wants_gradient: bool
    ) -> Tensor:
        wants_hidden, wants_weight, _, wants_bias, _ = (wants_gradient and need for need in ctx.needs_input_grad)
        kept = torch.nonzero(targets >= 0).squeeze(1)
        rows, labels = hidden.index_select(0, kept), targets.index_select(0, kept)
        w = weight.to(rows.dtype)
        b = None if bias is None else bias.to(rows.dtype)
        wide = torch.promote_types(rows.dtype, torch.float32)
        d_rows = torch.empty_like(rows) if wants_hidden else None
        d_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        d_bias = torch.zeros_like(bias, dtype=wide) if wants_bias and bias is not None else None
        total = torch.zeros((), dtype=wide, device=rows.device)
        chunk = max(1, CHUNK_ELEMENTS // w.shape[0])
        for start in range(0, rows.shape[0], chunk):
            span = slice(start, start + chunk)
            x, y = rows[span], labels[span].unsqueeze(1)
            logits = F.linear(x, w, b).to(wide)
            log_z = logits.logsumexp(dim=1, keepdim=True)
            total += (log_z - logits.gather(1, y)).sum()
            if d_rows is None and d_weight is None and d_bias is None:
                continue
            d_logits = logits.sub_(log_z).exp_()  # softmax, in the logits' own memory
            d_logits.scatter_add_(1, y, torch.full_like(y, -1, dtype=wide))
            if d_bias is not None:
                d_bias += d_logits.sum(0)
            d_narrow = d_logits.to(x.dtype)
            if d_rows is not None:
                torch.mm(d_narrow, w, out=d_rows[span])
            if d_weight is not None:
                d_weight += d_narrow.t() @ x
        ctx.save_for_backward(d_rows, d_weight, d_bias, kept)
        ctx.shape, ctx.dtypes = hidden.shape, (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, Tensor | None, None]:
        d_rows, d_weight, d_bias, kept = ctx.saved_tensors
        (scale,) = grads
        hidden_dtype, weight_dtype, bias_dtype = ctx.dtypes
        d_hidden = None
        if d_rows is not None:
            d_hidden = torch.zeros(ctx.shape, dtype=hidden_dtype, device=d_rows.device)
            d_hidden.index_copy_(0, kept, (d_rows * scale).to(hidden_dtype))
        return (
            d_hidden,
            None if d_weight is None else (d_weight * scale).to(weight_dtype),
            None,
            None if d_bias is None else (d_bias * scale).to(bias_dtype),
            None,
        )
