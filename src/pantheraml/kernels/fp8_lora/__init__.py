"""A frozen fp8 linear layer and its LoRA adapter in one matrix product, forward and backward."""

from pantheraml.kernels.fp8_lora.op import (
    LORA_COLUMNS,
    FP8Weights,
    fp8_lora_linear,
    quantise_rows,
    quantise_weight,
    write_lora_columns,
)
from pantheraml.kernels.fp8_lora.reference import reference_lora_linear

__all__ = [
    "LORA_COLUMNS",
    "FP8Weights",
    "fp8_lora_linear",
    "quantise_rows",
    "quantise_weight",
    "reference_lora_linear",
    "write_lora_columns",
]
