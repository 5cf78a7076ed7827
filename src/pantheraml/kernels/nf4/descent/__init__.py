"""Coordinate descent over NF4 codes, minimizing the change of a layer's outputs and input gradients."""

from pantheraml.kernels.nf4.descent.op import TILE, nf4_descent
from pantheraml.kernels.nf4.descent.reference import effective_weight, reference_nf4_descent

__all__ = ["TILE", "effective_weight", "nf4_descent", "reference_nf4_descent"]
