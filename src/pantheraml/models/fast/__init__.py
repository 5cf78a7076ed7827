"""Decoder layers with frozen weights and LoRA adapters, fused: few passes over memory, few things kept."""

from pantheraml.models.fast.functions import recomputing
from pantheraml.models.fast.head import quantise_head_like_layers
from pantheraml.models.fast.layers import FusionReport, fuse, is_fused

__all__ = ["FusionReport", "fuse", "is_fused", "quantise_head_like_layers", "recomputing"]
