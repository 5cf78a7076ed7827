"""Softmax of a chunk of logits: label scores, and the logit gradient in place or in e5m2."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pantheraml.kernels.dispatch import runs_triton
from pantheraml.kernels.fp8.e4m3 import E5M2, E5M2_MAX, MIN_SCALE


@dataclass(frozen=True)
class ScoreDetails:
    """Per-token metrics besides the loss; 0 where the label is negative."""

    entropy: Tensor
    is_top1: Tensor
    """Whether the label has the highest logit (ties included)."""
    mean_logits: Tensor
    """Mean of the logits over the vocabulary."""

    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.entropy, self.is_top1, self.mean_logits


@dataclass(frozen=True)
class Scores:
    """Per-token scores; 0 where the label is negative."""

    losses: Tensor
    """-log p(label), in float32 (float64 for float64 logits)."""
    details: ScoreDetails | None

    @classmethod
    def empty(cls, rows: Tensor, *, details: bool) -> Scores:
        """Uninitialized scores, one per row."""
        count, device = rows.shape[0], rows.device
        accum_dtype = torch.promote_types(rows.dtype, torch.float32)
        details_out = None
        if details:
            entropy, means = (torch.empty(count, dtype=accum_dtype, device=device) for _ in range(2))
            details_out = ScoreDetails(entropy, torch.empty(count, dtype=torch.bool, device=device), means)
        return cls(torch.empty(count, dtype=accum_dtype, device=device), details_out)

    def part(self, rows_slice: slice) -> Scores:
        """View of a slice of the tokens."""
        details = self.details
        if details is not None:
            details = ScoreDetails(*(each[rows_slice] for each in details.columns()))
        return Scores(self.losses[rows_slice], details)


def softmax(
    logits: Tensor,
    labels: Tensor,
    scores: Scores,
    gradient: Tensor | None = None,
    gradient_scales: Tensor | None = None,
) -> None:
    """Write `scores`, and to `gradient` the gradient of each loss with respect to its logits (0 for negative labels).

    `gradient` may be `logits` itself. With `gradient_scales` (one per row) it is e5m2, scaled so that the row's largest
    probability or label gradient is at the end of the range: with a large vocabulary all others are small next to it.
    """
    if runs_triton(logits):
        from pantheraml.kernels.linear_cross_entropy import triton_kernel

        details = scores.details
        columns = None if details is None else details.columns()
        triton_kernel.softmax(logits, labels, scores.losses, columns, gradient, gradient_scales)
    else:
        reference_softmax(logits, labels, scores, gradient, gradient_scales)


def reference_softmax(
    logits: Tensor, labels: Tensor, scores: Scores, gradient: Tensor | None, gradient_scales: Tensor | None
) -> None:
    """Torch reference of `softmax`."""
    has_target, chosen = labels >= 0, labels.clamp(min=0)[:, None]
    wide_logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_z = wide_logits.logsumexp(dim=1, keepdim=True)
    target = wide_logits.gather(1, chosen)
    p = (wide_logits - log_z).exp()
    scores.losses.copy_((log_z - target).squeeze(1).where(has_target, 0))
    if scores.details is not None:
        scores.details.entropy.copy_(torch.special.entr(p).sum(dim=1).where(has_target, 0))
        scores.details.mean_logits.copy_(wide_logits.mean(dim=1).where(has_target, 0))
        scores.details.is_top1.copy_(has_target & (target.squeeze(1) >= wide_logits.amax(dim=1)))
    if gradient is None:
        return
    amax = torch.maximum(p.amax(dim=1), 1 - p.gather(1, chosen).squeeze(1)).where(has_target, 0)
    d = p.scatter_add_(1, chosen, -torch.ones_like(log_z)).where(has_target[:, None], 0)
    if gradient_scales is None:
        gradient.copy_(d)
    else:
        gradient_scales.copy_((amax / E5M2_MAX).clamp(min=MIN_SCALE))
        scaled = d.float() * (1 / gradient_scales)[:, None]
        gradient.copy_(scaled.clamp(-E5M2_MAX, E5M2_MAX).to(E5M2))
