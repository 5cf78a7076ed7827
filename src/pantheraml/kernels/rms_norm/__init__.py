"""RMSNorm, fused with the residual addition and with the quantization of its output and its gradient."""

from pantheraml.kernels.rms_norm.op import (
    Normed,
    NormGradient,
    QuantizedRows,
    rms_norm,
    rms_norm_backward,
    rms_norm_backward_rows,
    rms_norm_weight_gradient,
)
from pantheraml.kernels.rms_norm.reference import (
    reference_rms_norm,
    reference_rms_norm_backward,
    reference_rms_norm_backward_quantized,
    reference_rms_norm_weight_gradient,
)

__all__ = [
    "NormGradient",
    "Normed",
    "QuantizedRows",
    "reference_rms_norm",
    "reference_rms_norm_backward",
    "reference_rms_norm_backward_quantized",
    "reference_rms_norm_weight_gradient",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_backward_rows",
    "rms_norm_weight_gradient",
]
