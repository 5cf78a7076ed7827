"""Cross entropy of a linear head without ever holding the full logits."""

from pantheraml.kernels.linear_cross_entropy.op import linear_cross_entropy
from pantheraml.kernels.linear_cross_entropy.reference import reference_linear_cross_entropy

__all__ = ["linear_cross_entropy", "reference_linear_cross_entropy"]
