"""Loss module: maps a batch to its summed token loss. This is what DDP wraps and the loop calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pantheraml.models.attention import uses_document_attention
from pantheraml.models.document_layout import DocumentLayout
from pantheraml.models.families import PlainHead, head_of, plain_head
from pantheraml.models.router_loss import RouterLoss, RouterSums


@dataclass(frozen=True)
class Routing:
    """Inputs of the auxiliary loss of a mixture of experts."""

    mask: Tensor
    """0 where a token is padding."""
    scale: float
    """Factor on the auxiliary loss, to match the summed (not averaged) token loss."""
    weights: Tensor | None
    """Weights of each expert's summed probabilities, from the global batch; None: this batch is the global batch."""


class LossModel(nn.Module):
    """Sum of -log p(target) over a batch. Never materializes full logits if the output head is a plain linear layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        head, reason = plain_head(model)
        self.full_logits_reason = None if head is not None else reason
        self.balance: RouterLoss | None = None
        """Load balancing of a mixture of experts; set only to train one."""
        self.routed: RouterSums | None = None
        """Router sums of the last batch with a `Routing`, detached."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        targets: Tensor,
        boundaries: Tensor | None = None,
        max_length: int | None = None,
        target_count: int | None = None,
        routing: Routing | None = None,
    ) -> Tensor:
        """Arguments as in `Batch`; those left None are computed from the tensors, with a device-to-host sync. With
        `routing`, add the auxiliary loss of a mixture of experts."""
        # Looked up on every call: DataParallel replicas of this module must use their own head.
        head = head_of(self.model) if self.full_logits_reason is None else None
        inputs: dict[str, Any] = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
        if max_length is not None and uses_document_attention(self.model):
            inputs |= DocumentLayout(boundaries, max_length).arguments()
        if routing is not None:
            inputs["output_router_logits"] = True
        loss, outputs = _loss_and_outputs(self.model, head, inputs, targets, target_count)
        if routing is not None:
            loss = loss + self._balancing(outputs.router_logits, routing).to(loss.device)
        return loss.to(input_ids.device)  # with a device map the loss is on the head's device

    def _balancing(self, router_logits: tuple[Tensor, ...], routing: Routing) -> Tensor:
        assert self.balance is not None
        sums = self.balance.sums(router_logits, routing.mask)
        self.routed = RouterSums(*(value.detach() for value in sums))
        if routing.weights is None:
            return routing.scale * sums.loss()
        weights = routing.weights.to(sums.probabilities)
        return routing.scale * (weights @ sums.probabilities) * len(weights)


def summed_loss(
    model: nn.Module, head: PlainHead | None, inputs: dict[str, Any], targets: Tensor, target_count: int | None
) -> Tensor:
    """Summed token loss of a model's inputs; through full logits if it has no plain `head`."""
    return _loss_and_outputs(model, head, inputs, targets, target_count)[0]


def _loss_and_outputs(
    model: nn.Module, head: PlainHead | None, inputs: dict[str, Any], targets: Tensor, target_count: int | None
) -> tuple[Tensor, Any]:
    """Summed loss, and the outputs of the model or its body."""
    if head is not None:
        outputs = head.body(**inputs)
        return head.loss(outputs.last_hidden_state, targets, target_count), outputs
    outputs = model(**inputs)
    wide = outputs.logits.flatten(0, -2).to(torch.promote_types(outputs.logits.dtype, torch.float32))
    return F.cross_entropy(wide, targets.flatten(), ignore_index=-100, reduction="sum"), outputs
