"""What all packed layers have in common."""

from __future__ import annotations

from torch import nn

from pantheraml.models.quantise.fp8 import FP8Linear
from pantheraml.models.quantise.nf4 import NF4Linear


def packed_buffers(model: nn.Module) -> list[str]:
    """Full names of the packed weights. No rank changes them on its own, so DDP must not send them at every step."""
    return [
        f"{name}.{buffer}"
        for name, layer in model.named_modules()
        if isinstance(layer, NF4Linear | FP8Linear)
        for buffer, _ in layer.named_buffers(recurse=False)
    ]
