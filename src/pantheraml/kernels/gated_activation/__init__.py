"""SwiGLU and GeGLU, fused with the quantization of their output and their gradient."""

from pantheraml.kernels.gated_activation.op import GatedRows, gated_activation, gated_activation_backward
from pantheraml.kernels.gated_activation.reference import reference_gated, reference_gated_backward

__all__ = ["GatedRows", "gated_activation", "gated_activation_backward", "reference_gated", "reference_gated_backward"]
