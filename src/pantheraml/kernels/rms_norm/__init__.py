"""RMS normalisation, fused with the residual sum and with the quantisation of its result and of its gradient."""

from pantheraml.kernels.rms_norm.op import (
    Gradient,
    Normed,
    Quantised,
    rms_norm,
    rms_norm_backward,
    rms_norm_backward_rows,
    rms_norm_weight_gradient,
)
from pantheraml.kernels.rms_norm.reference import (
    reference_rms_norm,
    reference_rms_norm_backward,
    reference_rms_norm_backward_quantised,
    reference_rms_norm_weight_gradient,
)

__all__ = [
    "Gradient",
    "Normed",
    "Quantised",
    "reference_rms_norm",
    "reference_rms_norm_backward",
    "reference_rms_norm_backward_quantised",
    "reference_rms_norm_weight_gradient",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_backward_rows",
    "rms_norm_weight_gradient",
]
