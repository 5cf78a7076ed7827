"""Rows of activations, gradients or weights in e4m3 with row-wise scales, or copied as they are."""

from pantheraml.kernels.quantise_rows.op import copy_rows, quantise_rows
from pantheraml.kernels.quantise_rows.reference import reference_quantise_rows

__all__ = ["copy_rows", "quantise_rows", "reference_quantise_rows"]
