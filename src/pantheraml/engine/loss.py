"""The model as a function from a batch to its summed token loss: the one thing that DDP wraps and the loop calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pantheraml.models.attention import DocumentLayout, uses_document_attention
from pantheraml.models.families import Head, head_of, plain_head
from pantheraml.models.routing import Balance, RouterSums


@dataclass(frozen=True)
class Routing:
    """What the auxiliary loss of a batch needs besides the batch."""

    mask: Tensor
    """0 where a token is padding."""
    scale: float
    """Of the auxiliary loss, for the summed token losses to be what it is added to."""
    weights: Tensor | None
    """Of each expert's summed probabilities, from the whole global batch; None: this batch is all of it."""


class LossModel(nn.Module):
    """Sum over the batch of -log p(target). Never holds full logits where the model's head is a plain linear layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        head, reason = plain_head(model)
        self.full_logits_reason = None if head is not None else reason
        self.balance: Balance | None = None
        """How a mixture of experts is kept balanced; only who trains one has to set it."""
        self.routed: RouterSums | None = None
        """Of the last batch that came with a `Routing`, without gradients."""

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
        """As `Batch` has them. What is None is found from the tensors, which makes the host wait for a GPU. With
        `routing`, the auxiliary loss of a mixture of experts is added."""
        # Looked up in `model` each time: in a copy of this module that is the copy's own.
        head = head_of(self.model) if self.full_logits_reason is None else None
        inputs: dict[str, Any] = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
        if max_length is not None and uses_document_attention(self.model):
            inputs |= DocumentLayout(boundaries, max_length).arguments()
        if routing is not None:
            inputs["output_router_logits"] = True
        loss, outputs = _loss_and_outputs(self.model, head, inputs, targets, target_count)
        if routing is not None:
            loss = loss + self._balancing(outputs.router_logits, routing).to(loss.device)
        return loss.to(input_ids.device)  # of a model on several devices it is where the head is

    def _balancing(self, router_logits: tuple[Tensor, ...], routing: Routing) -> Tensor:
        assert self.balance is not None
        sums = self.balance.sums(router_logits, routing.mask)
        self.routed = RouterSums(*(value.detach() for value in sums))
        if routing.weights is None:
            return routing.scale * sums.loss()
        weights = routing.weights.to(sums.probabilities)
        return routing.scale * (weights @ sums.probabilities) * len(weights)


def summed_loss(
    model: nn.Module, head: Head | None, inputs: dict[str, Any], targets: Tensor, target_count: int | None
) -> Tensor:
    """From what a model takes to its summed token loss; by way of full logits if it has no plain `head`."""
    return _loss_and_outputs(model, head, inputs, targets, target_count)[0]


def _loss_and_outputs(
    model: nn.Module, head: Head | None, inputs: dict[str, Any], targets: Tensor, target_count: int | None
) -> tuple[Tensor, Any]:
    """And what the model, or its body, gave besides."""
    if head is not None:
        outputs = head.body(**inputs)
        return head.loss(outputs.last_hidden_state, targets, target_count), outputs
    outputs = model(**inputs)
    wide = outputs.logits.flatten(0, -2).to(torch.promote_types(outputs.logits.dtype, torch.float32))
    return F.cross_entropy(wide, targets.flatten(), ignore_index=-100, reduction="sum"), outputs
