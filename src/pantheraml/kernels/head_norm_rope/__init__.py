"""RMSNorm of every query and key head, then RoPE, on merged query, key and value."""

from pantheraml.kernels.head_norm_rope.op import (
    AttentionHeads,
    HeadGradient,
    HeadNorms,
    head_norm_rope,
    head_norm_rope_backward,
    output_determines_input,
)
from pantheraml.kernels.head_norm_rope.reference import reference_head_norm_rope

__all__ = [
    "HeadGradient",
    "HeadNorms",
    "AttentionHeads",
    "head_norm_rope",
    "head_norm_rope_backward",
    "output_determines_input",
    "reference_head_norm_rope",
]
