"""Weights in nf4, rebuilt as e4m3 rows just before a product."""

from pantheraml.kernels.nf4_fill.op import nf4_fill, nf4_row_scales
from pantheraml.kernels.nf4_fill.reference import reference_fill

__all__ = ["nf4_fill", "nf4_row_scales", "reference_fill"]
