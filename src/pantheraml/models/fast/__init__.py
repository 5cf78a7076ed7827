"""Decoder layers with LoRA adapters, or trained as a whole, fused: few passes over memory, few things kept."""

from pantheraml.models.fast.functions import Recomputing, ToBeRecomputed
from pantheraml.models.fast.head import quantise_head_like_layers
from pantheraml.models.fast.layers import FusionReport, fuse, is_fused, record_passes, release_recordings, run_together
from pantheraml.models.fast.layouts import second_layouts, why_one_layout

__all__ = [
    "FusionReport",
    "Recomputing",
    "ToBeRecomputed",
    "fuse",
    "is_fused",
    "quantise_head_like_layers",
    "record_passes",
    "release_recordings",
    "run_together",
    "second_layouts",
    "why_one_layout",
]
