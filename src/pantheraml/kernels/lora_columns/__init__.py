"""LoRA adapters as extra columns of a matrix product, forward and backward."""

from pantheraml.kernels.lora_columns.op import (
    COLUMNS,
    DIVISOR,
    Adapter,
    AdapterPlaces,
    AdapterTable,
    Projection,
    adapter_gradients,
    add_columns,
    add_columns_back,
    place_columns,
    place_columns_back,
    project,
)
from pantheraml.kernels.lora_columns.sides import Left, Side
from pantheraml.kernels.lora_columns.spans import blocks_of, segments_of

__all__ = [
    "COLUMNS",
    "DIVISOR",
    "Adapter",
    "AdapterPlaces",
    "AdapterTable",
    "Left",
    "Projection",
    "Side",
    "adapter_gradients",
    "add_columns",
    "add_columns_back",
    "blocks_of",
    "place_columns",
    "place_columns_back",
    "project",
    "segments_of",
]
