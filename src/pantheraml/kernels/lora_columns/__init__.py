"""LoRA adapters as extra columns of a matrix product, forward and backward."""

from pantheraml.kernels.lora_columns.op import (
    COLUMNS,
    DIVISOR,
    Adapter,
    AdapterPlaces,
    AdapterTable,
    Left,
    adapter_gradient,
    place_columns,
    place_columns_back,
    project,
    splits_for,
)
from pantheraml.kernels.lora_columns.spans import blocks_of, segments_of

__all__ = [
    "COLUMNS",
    "DIVISOR",
    "Adapter",
    "AdapterPlaces",
    "AdapterTable",
    "Left",
    "adapter_gradient",
    "blocks_of",
    "place_columns",
    "place_columns_back",
    "project",
    "segments_of",
    "splits_for",
]
