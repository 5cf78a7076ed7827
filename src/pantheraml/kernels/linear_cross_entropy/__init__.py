"""Summed cross entropy of a linear output head, without materializing the full logits."""

from pantheraml.kernels.linear_cross_entropy.head import NEARLY_ALL
from pantheraml.kernels.linear_cross_entropy.op import fp8_linear_cross_entropy, linear_cross_entropy
from pantheraml.kernels.linear_cross_entropy.reference import reference_linear_cross_entropy

__all__ = ["NEARLY_ALL", "fp8_linear_cross_entropy", "linear_cross_entropy", "reference_linear_cross_entropy"]
