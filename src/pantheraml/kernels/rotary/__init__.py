"""Rotary position embedding, on merged query, key and value."""

from pantheraml.kernels.rotary.op import rotate, unrotate, unrotate_quantised
from pantheraml.kernels.rotary.reference import reference_rotate

__all__ = ["reference_rotate", "rotate", "unrotate", "unrotate_quantised"]
