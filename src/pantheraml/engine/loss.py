"""The model as a function from a batch to its summed token loss: the one thing that DDP wraps and the loop calls."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pantheraml.kernels.linear_cross_entropy import linear_cross_entropy
from pantheraml.models.families import plain_head


class LossModel(nn.Module):
    """Sum over the batch of -log p(target). Never holds full logits where the model's head is a plain linear layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        head, reason = plain_head(model)
        self.full_logits_reason = None if head is not None else reason
        # Kept out of the module tree: the head's parts are `model`'s own, and must not be registered twice.
        self._head = (head,)

    def forward(self, input_ids: Tensor, position_ids: Tensor, targets: Tensor) -> Tensor:
        (head,) = self._head
        if head is None:
            logits = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
            wide = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
            return F.cross_entropy(wide, targets.flatten(), ignore_index=-100, reduction="sum")
        hidden = head.body(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        return linear_cross_entropy(hidden, head.weight, targets, head.bias)
