"""The output head beside fused layers."""

from __future__ import annotations

from typing import Any

from torch import nn

from pantheraml.models.quantise.fp8 import FP8Linear, quantise_head
from pantheraml.models.quantise.nf4 import NF4Linear


def quantise_head_like_layers(model: Any, *, fused: bool) -> bool:
    """Turn the frozen output head of a transformers model into fp8 if its decoder layers multiply in fp8; whether it
    was. `fused`: they are fused, so that nf4 weights are multiplied in fp8, too."""
    kinds = {type(layer) for layer in model.modules()}
    if FP8Linear in kinds:
        return quantise_head(model)
    if NF4Linear not in kinds or not fused:
        return False
    # 4-bit weights are for those short of memory: there a head that is the embedding too gets no copy of its own.
    head = model.get_output_embeddings()
    tied = isinstance(head, nn.Linear) and head.weight is model.get_input_embeddings().weight
    return False if tied else quantise_head(model)
