"""Weights in nf4, moved one by one to the values that change a layer's products least."""

from pantheraml.kernels.nf4_descent.op import TILE, descend
from pantheraml.kernels.nf4_descent.reference import as_multiplied, reference_descend

__all__ = ["TILE", "as_multiplied", "descend", "reference_descend"]
