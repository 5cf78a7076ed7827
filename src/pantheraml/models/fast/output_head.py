"""fp8 quantization of the output head, to match fused layers."""

from __future__ import annotations

from typing import Any

from torch import nn

from pantheraml.models.quantize.fp8 import FP8Linear, quantize_head
from pantheraml.models.quantize.nf4 import NF4Linear


def quantize_head_like_layers(model: Any, *, fused: bool) -> bool:
    """Quantize the frozen output head to fp8 if the decoder layers use fp8 matmuls; return whether it was.

    `fused`: the layers are fused, so nf4 weights use fp8 matmuls, too.
    """
    kinds = {type(layer) for layer in model.modules()}
    if FP8Linear in kinds:
        return quantize_head(model)
    if NF4Linear not in kinds or not fused:
        return False
    # 4-bit weights mean that memory is short: a head tied to the embedding gets no copy of its own.
    head = model.get_output_embeddings()
    tied = isinstance(head, nn.Linear) and head.weight is model.get_input_embeddings().weight
    return False if tied else quantize_head(model)
