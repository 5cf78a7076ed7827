"""LoRA adapters as extra columns of the base matmul, forward and backward."""

from pantheraml.kernels.lora_columns.adapter_layout import block_table, segment_table
from pantheraml.kernels.lora_columns.grad_operands import GradMatmul, LeftOperand
from pantheraml.kernels.lora_columns.op import (
    COLUMNS,
    DIVISOR,
    Adapter,
    AdapterBuffers,
    AdapterTable,
    Projection,
    adapter_gradients,
    add_columns,
    add_columns_backward,
    place_columns,
    place_columns_backward,
    project,
)

__all__ = [
    "COLUMNS",
    "DIVISOR",
    "Adapter",
    "AdapterBuffers",
    "AdapterTable",
    "GradMatmul",
    "LeftOperand",
    "Projection",
    "adapter_gradients",
    "add_columns",
    "add_columns_backward",
    "block_table",
    "place_columns",
    "place_columns_backward",
    "project",
    "segment_table",
]
