"""Torch reference of token scores, with full logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def reference_token_scores(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per target: log softmax(hidden @ weight.T + bias)[target], the entropy, whether no token is more likely, and the
    mean logit.

    All have the shape of `targets` and are 0 where the target is negative.
    """
    logits = F.linear(hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype))
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    has_target = targets >= 0
    target_log_p = log_p.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1).detach()
    is_top1 = target_log_p >= log_p.amax(-1)
    mean_logits = logits.to(log_p.dtype).mean(-1).detach()
    return target_log_p * has_target, entropy * has_target, is_top1 & has_target, mean_logits * has_target
