"""Ops of full fp8 fine-tuning: casts and gradients of trainable weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernel_op import Implementation, Inputs, Layer, Op, e4m3_matrix, either, quantized


def rms_norm_weight_gradient(layer: Layer) -> Op:
    import torch

    from pantheraml.kernels.rms_norm import reference_rms_norm_weight_gradient as reference
    from pantheraml.kernels.rms_norm import rms_norm_weight_gradient as ours

    return Op(
        inputs={
            "g": layer.normal(layer.tokens, layer.width),
            "x": layer.normal(layer.tokens, layer.width),
            "inverse": (1 + 0.1 * layer.normal(layer.tokens)).float(),
        },
        ours=lambda t: ours(t["g"], t["x"], t["inverse"], torch.bfloat16),
        reference=lambda t: reference(t["g"], t["x"], t["inverse"], torch.bfloat16),
    )


def weight_to_e4m3(layer: Layer, *, transposed: bool) -> Op:
    """Cast gate or up to the e4m3 operand of a matmul."""
    from pantheraml.kernels.fp8.weight_cast import reference_weight_to_e4m3, weight_scales
    from pantheraml.kernels.fp8.weight_cast import weight_to_e4m3 as ours

    weight = layer.normal(layer.inner, layer.width)
    scales = weight_scales([weight], layer.inner)

    def into_matrix(write: Callable[..., None], scale: Any) -> Implementation:
        return lambda t: e4m3_matrix(layer, scales, lambda rows: write(t["weight"], scale, rows), transposed=transposed)

    return Op(
        inputs={"weight": weight},
        ours=into_matrix(ours, scales),
        reference=into_matrix(reference_weight_to_e4m3, scales[0]),
        exact=lambda t: t["weight"],
        read=either,
    )


def weight_scales(layer: Layer) -> Op:
    """Shared scale of gate and up, which are one matrix."""
    from pantheraml.kernels.fp8.weight_cast import reference_weight_scale as reference
    from pantheraml.kernels.fp8.weight_cast import weight_scales as ours

    return Op(
        inputs={name: layer.normal(layer.inner, layer.width) for name in ("gate", "up")},
        ours=lambda t: ours([t["gate"], t["up"]], 2 * layer.inner),
        reference=lambda t: reference([t["gate"], t["up"]]).repeat(2 * layer.inner),
    )


def fp8_transpose(layer: Layer, *, scaled: bool) -> Op:
    """Transpose the gradient of gate or up for the weight-gradient matmul; `scaled`: fold in the row scales."""
    import torch

    from pantheraml.kernels.fp8.transpose import fp8_transpose as ours
    from pantheraml.kernels.fp8.transpose import reference_fp8_transpose

    qdata, scales = quantized(layer.normal(layer.tokens, layer.inner))
    factors = scales if scaled else None

    def reference(t: Inputs) -> Any:
        out = torch.empty(layer.inner, layer.tokens, dtype=torch.float8_e4m3fn, device=layer.device)
        return out, reference_fp8_transpose(t["qdata"], factors, out)

    return Op(
        inputs={"qdata": qdata},
        ours=lambda t: ours(t["qdata"], factors),
        reference=reference,
        exact=lambda t: ((t["qdata"] * scales[:, None] if scaled else t["qdata"]).T, None),
        read=lambda transposed_rows: (transposed_rows[0],) if transposed_rows[1] is None else either(transposed_rows),
    )


OPS: dict[str, Callable[[Layer], Op]] = {
    "rms_norm_weight_gradient": rms_norm_weight_gradient,
    "weight_scales": weight_scales,
    "weight_to_e4m3": lambda layer: weight_to_e4m3(layer, transposed=False),
    "weight_to_e4m3, transposed": lambda layer: weight_to_e4m3(layer, transposed=True),
    "fp8_transpose": lambda layer: fp8_transpose(layer, scaled=False),
    "fp8_transpose, scaled": lambda layer: fp8_transpose(layer, scaled=True),
}
