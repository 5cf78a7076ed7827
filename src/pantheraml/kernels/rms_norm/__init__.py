"""RMS normalisation, fused with the residual sum and with the quantisation of its result."""

from pantheraml.kernels.rms_norm.op import Normed, rms_norm, rms_norm_backward
from pantheraml.kernels.rms_norm.reference import reference_rms_norm, reference_rms_norm_backward

__all__ = ["Normed", "reference_rms_norm", "reference_rms_norm_backward", "rms_norm", "rms_norm_backward"]
