"""Transpose of e4m3 rows for the weight-gradient matmul."""

from pantheraml.kernels.fp8.transpose.op import fp8_transpose
from pantheraml.kernels.fp8.transpose.reference import reference_fp8_transpose

__all__ = ["reference_fp8_transpose", "fp8_transpose"]
