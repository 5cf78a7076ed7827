"""Convert NF4 weights to e4m3 rows just before a matmul."""

from pantheraml.kernels.nf4.to_fp8.op import nf4_row_scales, nf4_to_fp8
from pantheraml.kernels.nf4.to_fp8.reference import reference_nf4_to_fp8

__all__ = ["nf4_to_fp8", "nf4_row_scales", "reference_nf4_to_fp8"]
