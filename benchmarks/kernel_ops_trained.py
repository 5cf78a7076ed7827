"""The ops of full fine-tunes in fp8: weights that change at every step, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernel_op import Implementation, Inputs, Layer, Op, e4m3_matrix, either, quantised


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
    """Gate or up, as it is trained, to the matrix of a product."""
    from pantheraml.kernels.trained_weight import reference_weight_to_e4m3, weight_scales
    from pantheraml.kernels.trained_weight import weight_to_e4m3 as ours

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
    """One scale for gate and up, which share a matrix."""
    from pantheraml.kernels.trained_weight import reference_weight_scale as reference
    from pantheraml.kernels.trained_weight import weight_scales as ours

    return Op(
        inputs={name: layer.normal(layer.inner, layer.width) for name in ("gate", "up")},
        ours=lambda t: ours([t["gate"], t["up"]], 2 * layer.inner),
        reference=lambda t: reference([t["gate"], t["up"]]).repeat(2 * layer.inner),
    )


def turned_rows(layer: Layer, *, scaled: bool) -> Op:
    """The gradient of gate or up turned over, for a product over tokens; `scaled`: with the rows' scales in it."""
    import torch

    from pantheraml.kernels.turned_rows import reference_turned_rows
    from pantheraml.kernels.turned_rows import turned_rows as ours

    payload, scales = quantised(layer.normal(layer.tokens, layer.inner))
    factors = scales if scaled else None

    def reference(t: Inputs) -> Any:
        out = torch.empty(layer.inner, layer.tokens, dtype=torch.float8_e4m3fn, device=layer.device)
        return out, reference_turned_rows(t["payload"], factors, out)

    return Op(
        inputs={"payload": payload},
        ours=lambda t: ours(t["payload"], factors),
        reference=reference,
        exact=lambda t: ((t["payload"] * scales[:, None] if scaled else t["payload"]).T, None),
        read=lambda turned: (turned[0],) if turned[1] is None else either(turned),
    )


OPS: dict[str, Callable[[Layer], Op]] = {
    "rms_norm_weight_gradient": rms_norm_weight_gradient,
    "weight_scales": weight_scales,
    "weight_to_e4m3": lambda layer: weight_to_e4m3(layer, transposed=False),
    "weight_to_e4m3, transposed": lambda layer: weight_to_e4m3(layer, transposed=True),
    "turned_rows": lambda layer: turned_rows(layer, scaled=False),
    "turned_rows, scaled": lambda layer: turned_rows(layer, scaled=True),
}
