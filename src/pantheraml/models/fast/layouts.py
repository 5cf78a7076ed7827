"""The second layout of a model's fp8 weights: whether there is room for it, and what it takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pantheraml.models.fast.groups import ProjectionGroup
from pantheraml.models.fast.layers import is_fused
from pantheraml.models.quantise.fp8 import FP8Linear
from pantheraml.planner.layouts import too_large_for_two


def why_one_layout(model: nn.Module) -> str | None:
    """Why a loaded model's fp8 weights are too large for two layouts where nobody asked for two; None: they are not."""
    weights = [layer.qweight for layer in model.modules() if isinstance(layer, FP8Linear)]
    if not weights or not weights[0].is_cuda:
        return None
    total = torch.cuda.get_device_properties(weights[0].device).total_memory
    return too_large_for_two(sum(weight.numel() for weight in weights), total)


def second_layouts(model: nn.Module) -> list[Tensor]:
    """The matrices that `model` keeps besides its buffers."""
    groups = [group for layer in model.modules() if is_fused(layer) for group in _groups(layer)]
    frozen = [group for group in groups if isinstance(group, ProjectionGroup)]
    return [kept.second for group in frozen if (kept := group.kept_twice()) is not None]


def _groups(layer: Any) -> Any:
    return layer.fused_parts.groups
