"""fp8 matmul, and the byte transpose that the backward pass needs."""

from pantheraml.kernels.fp8.matmul.op import fp8_matmul, transposed
from pantheraml.kernels.fp8.matmul.reference import reference_fp8_matmul, reference_transpose

__all__ = ["fp8_matmul", "reference_fp8_matmul", "reference_transpose", "transposed"]
