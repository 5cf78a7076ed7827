"""Move a batch of any structure to a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


def move_batch(batch: Any, device: torch.device) -> Any:
    if callable(getattr(batch, "to", None)):  # a tensor, or a tokenizer's BatchEncoding
        return batch.to(device, non_blocking=True)
    return tree_map_only(Tensor, lambda value: value.to(device, non_blocking=True), batch)
