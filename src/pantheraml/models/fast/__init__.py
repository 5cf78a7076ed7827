"""Fused decoder layers, with LoRA adapters or fully trainable: few passes over memory, few saved tensors."""

from pantheraml.models.fast.autograd_functions import CheckpointedForward, CheckpointRecompute
from pantheraml.models.fast.layers import (
    FusionReport,
    enable_layer_chain,
    enable_layer_graphs,
    fuse,
    is_fused,
    release_layer_graphs,
)
from pantheraml.models.fast.long_sequences import long_sequence_note
from pantheraml.models.fast.output_head import quantize_head_like_layers

__all__ = [
    "FusionReport",
    "CheckpointRecompute",
    "CheckpointedForward",
    "fuse",
    "long_sequence_note",
    "is_fused",
    "quantize_head_like_layers",
    "enable_layer_graphs",
    "release_layer_graphs",
    "enable_layer_chain",
]
