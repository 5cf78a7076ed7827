"""Row-wise e4m3 quantization of activations, gradients or weights, and a plain padded copy."""

from pantheraml.kernels.fp8.quantize_rows.op import copy_rows, quantize_rows
from pantheraml.kernels.fp8.quantize_rows.reference import reference_quantize_rows

__all__ = ["copy_rows", "quantize_rows", "reference_quantize_rows"]
