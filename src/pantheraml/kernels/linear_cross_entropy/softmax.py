"""From the logits of a chunk to the scores of its labels and to the gradient of its logits, in place or in e5m2."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pantheraml.kernels.dispatch import runs_triton
from pantheraml.kernels.e4m3 import E5M2, LARGEST_E5M2, SMALLEST_SCALE


@dataclass(frozen=True)
class Details:
    """What is known of each token besides its loss; 0 where the label is negative."""

    entropy: Tensor
    is_top1: Tensor
    """Whether no logit is larger than the label's."""


@dataclass(frozen=True)
class Scores:
    """One entry a token; 0 where its label is negative."""

    losses: Tensor
    """-log p(label), in float32 (float64 for float64 logits)."""
    details: Details | None

    @classmethod
    def room(cls, rows: Tensor, *, details: bool) -> Scores:
        """Unwritten, for as many tokens as there are rows."""
        count, device = rows.shape[0], rows.device
        wide = torch.promote_types(rows.dtype, torch.float32)
        more = None
        if details:
            entropy = torch.empty(count, dtype=wide, device=device)
            more = Details(entropy, torch.empty(count, dtype=torch.bool, device=device))
        return cls(torch.empty(count, dtype=wide, device=device), more)

    def part(self, span: slice) -> Scores:
        """A view of some of the tokens."""
        more = self.details
        return Scores(self.losses[span], None if more is None else Details(more.entropy[span], more.is_top1[span]))


def softmax(
    logits: Tensor,
    labels: Tensor,
    scores: Scores,
    gradient: Tensor | None = None,
    gradient_scales: Tensor | None = None,
) -> None:
    """Writes `scores`, and to `gradient` that of each loss with respect to its logits (0 for negative labels).

    `gradient` may be `logits` itself. With `gradient_scales`, one a row, it is in e5m2 and uses the whole range, up to
    the largest probability or the label's gradient: those of a large vocabulary are small beside it.
    """
    if runs_triton(logits):
        from pantheraml.kernels.linear_cross_entropy import triton_kernel

        more = scores.details
        pair = None if more is None else (more.entropy, more.is_top1)
        triton_kernel.softmax(logits, labels, scores.losses, pair, gradient, gradient_scales)
    else:
        reference_softmax(logits, labels, scores, gradient, gradient_scales)


def reference_softmax(
    logits: Tensor, labels: Tensor, scores: Scores, gradient: Tensor | None, gradient_scales: Tensor | None
) -> None:
    """The definition."""
    counted, chosen = labels >= 0, labels.clamp(min=0)[:, None]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_z = wide.logsumexp(dim=1, keepdim=True)
    target = wide.gather(1, chosen)
    p = (wide - log_z).exp()
    scores.losses.copy_((log_z - target).squeeze(1).where(counted, 0))
    if scores.details is not None:
        scores.details.entropy.copy_(torch.special.entr(p).sum(dim=1).where(counted, 0))
        scores.details.is_top1.copy_(counted & (target.squeeze(1) >= wide.amax(dim=1)))
    if gradient is None:
        return
    found = torch.maximum(p.amax(dim=1), 1 - p.gather(1, chosen).squeeze(1)).where(counted, 0)
    d = p.scatter_add_(1, chosen, -torch.ones_like(log_z)).where(counted[:, None], 0)
    if gradient_scales is None:
        gradient.copy_(d)
    else:
        gradient_scales.copy_((found / LARGEST_E5M2).clamp(min=SMALLEST_SCALE))
        scaled = d.float() * (1 / gradient_scales)[:, None]
        gradient.copy_(scaled.clamp(-LARGEST_E5M2, LARGEST_E5M2).to(E5M2))
