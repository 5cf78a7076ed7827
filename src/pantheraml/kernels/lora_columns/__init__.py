"""LoRA adapters as extra columns of a matrix product, forward and backward."""

from pantheraml.kernels.lora_columns.op import (
    COLUMNS,
    DIVISOR,
    Adapter,
    AdapterPlaces,
    AdapterTable,
    adapter_gradient,
    blocks_of,
    place_columns,
    project,
    segments_of,
    splits_for,
)

__all__ = [
    "COLUMNS",
    "DIVISOR",
    "Adapter",
    "AdapterPlaces",
    "AdapterTable",
    "adapter_gradient",
    "blocks_of",
    "place_columns",
    "project",
    "segments_of",
    "splits_for",
]
