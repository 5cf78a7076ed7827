"""RoPE on merged query, key and value."""

from pantheraml.kernels.rotary.op import rope_backward, rope_backward_quantized, rope_forward
from pantheraml.kernels.rotary.reference import reference_rope

__all__ = ["reference_rope", "rope_forward", "rope_backward", "rope_backward_quantized"]
