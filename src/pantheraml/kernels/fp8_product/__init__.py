"""Matrix products in fp8, and the byte transposition that the backward pass needs."""

from pantheraml.kernels.fp8_product.op import fp8_product, transposed
from pantheraml.kernels.fp8_product.reference import reference_product, reference_transpose

__all__ = ["fp8_product", "reference_product", "reference_transpose", "transposed"]
