"""The second weight layout of fp8 weights: whether it fits in memory, and which tensors it adds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pantheraml.models.fast.layers import is_fused
from pantheraml.models.fast.linear_groups import LoraGroup
from pantheraml.models.quantize.fp8 import FP8Linear
from pantheraml.planner.fp8_layout_choice import why_single_layout


def why_one_layout(model: nn.Module) -> str | None:
    """Return why the fp8 weights are too large for two layouts by default; None if they are not."""
    weights = [layer.qweight for layer in model.modules() if isinstance(layer, FP8Linear)]
    if not weights or not weights[0].is_cuda:
        return None
    total = torch.cuda.get_device_properties(weights[0].device).total_memory
    return why_single_layout(sum(weight.numel() for weight in weights), total)


def second_layouts(model: nn.Module) -> list[Tensor]:
    """Return the transposed matrices that `model` holds besides its buffers."""
    groups = [group for layer in model.modules() if is_fused(layer) for group in _groups(layer)]
    frozen = [group for group in groups if isinstance(group, LoraGroup)]
    return [storage.backward_layout for group in frozen if (storage := group.two_layout_storage()) is not None]


def _groups(layer: Any) -> Any:
    return layer.fused_parts.groups
