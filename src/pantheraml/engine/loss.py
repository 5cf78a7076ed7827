"""The model as a function from a batch to its summed token loss: the one thing that DDP wraps and the loop calls."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pantheraml.models.attention import DocumentLayout, uses_document_attention
from pantheraml.models.families import Head, head_of, plain_head


class LossModel(nn.Module):
    """Sum over the batch of -log p(target). Never holds full logits where the model's head is a plain linear layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        head, reason = plain_head(model)
        self.full_logits_reason = None if head is not None else reason

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        targets: Tensor,
        boundaries: Tensor | None = None,
        max_length: int | None = None,
        target_count: int | None = None,
    ) -> Tensor:
        """As `Batch` has them. What is None is found from the tensors, which makes the host wait for a GPU."""
        # Looked up in `model` each time: in a copy of this module that is the copy's own.
        head = head_of(self.model) if self.full_logits_reason is None else None
        inputs: dict[str, Any] = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
        if max_length is not None and uses_document_attention(self.model):
            inputs |= DocumentLayout(boundaries, max_length).arguments()
        loss = summed_loss(self.model, head, inputs, targets, target_count)
        return loss.to(input_ids.device)  # of a model on several devices it is where the head is


def summed_loss(
    model: nn.Module, head: Head | None, inputs: dict[str, Any], targets: Tensor, target_count: int | None
) -> Tensor:
    """From what a model takes to its summed token loss; by way of full logits if it has no plain `head`."""
    if head is not None:
        return head.loss(head.body(**inputs).last_hidden_state, targets, target_count)
    logits = model(**inputs).logits
    wide = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, targets.flatten(), ignore_index=-100, reduction="sum")
