"""torch.compile, one decoder layer at a time.

All layers of a model run the same code on tensors of the same shapes, so the first one's compilation serves the others,
and a model of 80 layers compiles as fast as one of 8. Compiling the model as a whole would take minutes and gain little
between layers.
"""

from __future__ import annotations

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from pantheraml.models.fast import is_fused


def compile_layers(model: nn.Module) -> int:
    """Compile every decoder layer that is not fused, in place; how many there are. Shapes are taken as fixed."""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and not is_fused(m)]
    for layer in layers:
        layer.compile(dynamic=False)
    return len(layers)
