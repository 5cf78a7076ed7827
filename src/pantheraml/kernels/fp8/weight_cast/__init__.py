"""Cast trainable weights to e4m3 for the matmuls of a step."""

from pantheraml.kernels.fp8.weight_cast.op import weight_scales, weight_to_e4m3
from pantheraml.kernels.fp8.weight_cast.reference import reference_weight_scale, reference_weight_to_e4m3

__all__ = ["reference_weight_scale", "reference_weight_to_e4m3", "weight_scales", "weight_to_e4m3"]
