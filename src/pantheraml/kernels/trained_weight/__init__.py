"""Weights in training, written into e4m3 matrices for the products of a step."""

from pantheraml.kernels.trained_weight.op import weight_scales, weight_to_e4m3
from pantheraml.kernels.trained_weight.reference import reference_weight_scale, reference_weight_to_e4m3

__all__ = ["reference_weight_scale", "reference_weight_to_e4m3", "weight_scales", "weight_to_e4m3"]
