"""Rows of activations, gradients or weights in e4m3 with row-wise scales."""

from pantheraml.kernels.quantise_rows.op import quantise_rows
from pantheraml.kernels.quantise_rows.reference import reference_quantise_rows

__all__ = ["quantise_rows", "reference_quantise_rows"]
