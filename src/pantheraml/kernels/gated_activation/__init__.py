"""SwiGLU and GeGLU, fused with the quantisation of their result and of their gradient."""

from pantheraml.kernels.gated_activation.op import Rows, gated_activation, gated_activation_backward
from pantheraml.kernels.gated_activation.reference import reference_gated, reference_gated_backward

__all__ = ["Rows", "gated_activation", "gated_activation_backward", "reference_gated", "reference_gated_backward"]
