"""The ops that kernels.py measures: what each computes, on what, and who else computes it.

To add one, write a function that returns its `Op`, at the full size (Llama-3.1-8B's layer, 8,192 tokens) and at a tiny
one, and put it into OPS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Inputs = dict[str, Any]
"""By name. Tensors that require a gradient are what the backward pass is measured on; without any there is none."""
Implementation = Callable[[Inputs], Any]
"""From inputs to the result; to one tensor, if it is differentiated."""


def as_it_is(result: Any) -> tuple[Any, ...]:
    return (result,)


@dataclass(frozen=True)
class Op:
    """`ours` and `reference` do the same work; `exact` is its definition without any rounding (None: the reference).

    `others` are makers: each imports what it needs and returns an implementation, or raises ImportError. `read` makes
    tensors that can be compared out of a result; its time does not count.
    """

    inputs: Inputs
    ours: Implementation
    reference: Implementation
    exact: Implementation | None = None
    read: Callable[[Any], tuple[Any, ...]] = as_it_is
    others: Mapping[str, Callable[[], Implementation]] = field(default_factory=dict)


class Layer:
    """Sizes of a layer, and random bf16 tensors on a device."""

    def __init__(self, size: str, device: str) -> None:
        import torch

        full = size == "full"
        self.tokens, self.width, self.inner = (8192, 4096, 14336) if full else (32, 128, 256)
        self.vocabulary, self.rank = (128_256 if full else 128), 16
        self.heads, self.key_heads, self.head_dim = (32, 8, 128) if full else (4, 2, 32)
        self.device = device
        self._random = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int) -> Any:
        import torch

        return torch.randn(shape, generator=self._random, device=self.device, dtype=torch.bfloat16)

    def targets(self) -> Any:
        import torch

        return torch.randint(self.vocabulary, (self.tokens,), generator=self._random, device=self.device)


def either(rows: Any) -> tuple[Any, ...]:
    """(payload, scales, ...) in e4m3 with a scale per row as the numbers they stand for; a plain tensor as it is."""
    if not isinstance(rows, tuple):
        return (rows,)
    payload, scales = rows[:2]
    return (payload.float() * scales[:, None],)


def linear_cross_entropy(layer: Layer, *, trained_head: bool) -> Op:
    from pantheraml.kernels.linear_cross_entropy import linear_cross_entropy as ours
    from pantheraml.kernels.linear_cross_entropy import reference_linear_cross_entropy as reference

    def torch_own() -> Implementation:
        from torch.nn import LinearCrossEntropyOptions  # type: ignore[attr-defined, unused-ignore]
        from torch.nn.functional import linear_cross_entropy  # type: ignore[attr-defined, unused-ignore]

        chunked = LinearCrossEntropyOptions()
        return lambda t: linear_cross_entropy(t["hidden"], t["weight"], t["targets"], reduction="sum", options=chunked)

    def liger() -> Implementation:
        from liger_kernel.transformers import (  # type: ignore[import-not-found, unused-ignore]
            LigerFusedLinearCrossEntropyLoss,
        )

        loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        return lambda t: loss(t["weight"], t["hidden"], t["targets"])

    def cut_cross_entropy() -> Implementation:
        from cut_cross_entropy import linear_cross_entropy  # type: ignore[import-not-found, unused-ignore]

        return lambda t: linear_cross_entropy(t["hidden"], t["weight"], t["targets"], reduction="sum")

    return Op(
        inputs={
            "hidden": layer.normal(layer.tokens, layer.width).requires_grad_(),
            "weight": (0.02 * layer.normal(layer.vocabulary, layer.width)).requires_grad_(trained_head),
            "targets": layer.targets(),
        },
        ours=lambda t: ours(t["hidden"], t["weight"], t["targets"]),
        reference=lambda t: reference(t["hidden"], t["weight"], t["targets"]),
        others={"torch": torch_own, "Liger": liger, "cut-cross-entropy": cut_cross_entropy},
    )


def fp8_linear_cross_entropy(layer: Layer) -> Op:
    """A frozen head in e4m3, against the same head in bf16."""
    from pantheraml.kernels.linear_cross_entropy import fp8_linear_cross_entropy as ours
    from pantheraml.kernels.linear_cross_entropy import reference_linear_cross_entropy as reference
    from pantheraml.models.quantise.fp8 import FP8Linear

    weight = 0.02 * layer.normal(layer.vocabulary, layer.width)
    head = FP8Linear(weight, None, scales="one")
    return Op(
        inputs={
            "hidden": layer.normal(layer.tokens, layer.width).requires_grad_(),
            "weight": weight,
            "targets": layer.targets(),
        },
        ours=lambda t: ours(t["hidden"], head.qweight, head.scale[0], t["targets"]),
        reference=lambda t: reference(t["hidden"], t["weight"], t["targets"]),
    )


def quantise_rows(layer: Layer) -> Op:
    from pantheraml.kernels.quantise_rows import quantise_rows as ours
    from pantheraml.kernels.quantise_rows import reference_quantise_rows as reference

    return Op(
        inputs={"x": layer.normal(layer.tokens, layer.width)},
        ours=lambda t: ours(t["x"]),
        reference=lambda t: reference(t["x"]),
        exact=lambda t: t["x"],
        read=either,
    )


def copy_rows(layer: Layer) -> Op:
    """Rows with room for an adapter's columns: what `quantise_rows` is where products are in bf16."""
    import torch

    from pantheraml.kernels.quantise_rows import copy_rows as ours

    room = 64

    def reference(t: Inputs) -> Any:
        out = torch.empty(layer.tokens, layer.width + room, dtype=t["x"].dtype, device=layer.device)
        out[:, : layer.width] = t["x"]
        return out

    return Op(
        inputs={"x": layer.normal(layer.tokens, layer.width)},
        ours=lambda t: ours(t["x"], room=room, dtype=t["x"].dtype),
        reference=reference,
        read=lambda out: (out[:, : layer.width],),
    )


def rms_norm(layer: Layer) -> Op:
    """Residual sum, norm and quantisation: what stands before a layer's products."""
    from pantheraml.kernels.quantise_rows import reference_quantise_rows
    from pantheraml.kernels.rms_norm import reference_rms_norm
    from pantheraml.kernels.rms_norm import rms_norm as ours

    def plain(t: Inputs) -> Any:
        return reference_rms_norm(t["x"] + t["delta"], t["weight"], 1e-5)[0]

    return Op(
        inputs={
            "x": layer.normal(layer.tokens, layer.width),
            "delta": layer.normal(layer.tokens, layer.width),
            "weight": 1 + 0.1 * layer.normal(layer.width),
        },
        ours=lambda t: ours(t["x"], t["weight"], 1e-5, delta=t["delta"]),
        reference=lambda t: reference_quantise_rows(plain(t)),
        exact=plain,
        read=either,
    )


def rms_norm_backward(layer: Layer) -> Op:
    """From a norm's result in e4m3, the gradient of the residual sum before it, and the same rows quantised for the
    product before the sum."""
    from pantheraml.kernels.e4m3 import E4M3
    from pantheraml.kernels.quantise_rows import reference_quantise_rows
    from pantheraml.kernels.rms_norm import Quantised, reference_rms_norm_backward_quantised
    from pantheraml.kernels.rms_norm import rms_norm_backward_rows as ours

    def plain(t: Inputs) -> Any:
        return reference_rms_norm_backward_quantised(
            t["g"], t["payload"], t["scales"], t["weight"], t["inverse"], residual=t["residual"]
        )

    def fused(t: Inputs) -> Any:
        x = Quantised(t["payload"], t["scales"])
        return ours(t["g"], x, t["weight"], t["inverse"], residual=t["residual"], dtype=E4M3)

    def reference(t: Inputs) -> tuple[Any, ...]:
        dx = plain(t)
        return dx, *reference_quantise_rows(dx)

    payload, scales = reference_quantise_rows(layer.normal(layer.tokens, layer.width))
    return Op(
        inputs={
            "g": layer.normal(layer.tokens, layer.width),
            "payload": payload,
            "scales": scales,
            "weight": 1 + 0.1 * layer.normal(layer.width),
            "inverse": (1 + 0.1 * layer.normal(layer.tokens)).float(),
            "residual": layer.normal(layer.tokens, layer.width),
        },
        ours=fused,
        reference=reference,
        exact=lambda t: (plain(t), plain(t)),
        read=lambda out: (out[0], *either(tuple(out[1:]) if len(out) > 2 else out[1])),
    )


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


def gated_activation(layer: Layer) -> Op:
    """SiLU(gate) times up, quantised for the product that follows."""
    from pantheraml.kernels.gated_activation import gated_activation as ours
    from pantheraml.kernels.gated_activation import reference_gated
    from pantheraml.kernels.quantise_rows import reference_quantise_rows

    return Op(
        inputs={"pair": layer.normal(layer.tokens, 2 * layer.inner)},
        ours=lambda t: ours(t["pair"]),
        reference=lambda t: reference_quantise_rows(reference_gated(t["pair"])),
        exact=lambda t: reference_gated(t["pair"]),
        read=either,
    )


def gated_activation_backward(layer: Layer) -> Op:
    """The hidden rows again, and the gradient of gate and up, both quantised."""
    from pantheraml.kernels.gated_activation import gated_activation_backward as ours
    from pantheraml.kernels.gated_activation import reference_gated, reference_gated_backward
    from pantheraml.kernels.quantise_rows import reference_quantise_rows

    def plain(t: Inputs) -> tuple[Any, Any]:
        return reference_gated(t["pair"]), reference_gated_backward(t["g"], t["pair"])

    def reference(t: Inputs) -> tuple[Any, Any]:
        hidden, gradient = plain(t)
        return reference_quantise_rows(hidden), reference_quantise_rows(gradient, t["multiplier"])

    return Op(
        inputs={
            "g": layer.normal(layer.tokens, layer.inner),
            "pair": layer.normal(layer.tokens, 2 * layer.inner),
            "multiplier": (1 + layer.normal(2 * layer.inner).abs()).float(),
        },
        ours=lambda t: ours(t["g"], t["pair"], multiplier=t["multiplier"], rooms=(0, 0)),
        reference=reference,
        exact=lambda t: (plain(t)[0], plain(t)[1] * t["multiplier"]),
        read=lambda both: (*either(both[0]), *either(both[1])),
    )


def _matrix(layer: Layer, scales: Any, fill: Callable[[Any], None], *, transposed: bool) -> tuple[Any, Any]:
    """A new e4m3 matrix for gate or up, filled: for the way forward, or transposed, for the way back."""
    import torch

    shape = (layer.width, layer.inner) if transposed else (layer.inner, layer.width)
    out = torch.empty(shape, dtype=torch.float8_e4m3fn, device=layer.device)
    rows = out.T if transposed else out
    fill(rows)
    return rows, scales


def nf4_fill(layer: Layer, *, transposed: bool) -> Op:
    """Gate or up from nf4 to the matrix of a product."""
    import torch

    from pantheraml.kernels.nf4 import NF4Weight
    from pantheraml.kernels.nf4_fill import nf4_fill as ours
    from pantheraml.kernels.nf4_fill import nf4_row_scales, reference_fill

    weight = NF4Weight.pack(layer.normal(layer.inner, layer.width) * layer.width**-0.5)
    scales = nf4_row_scales(weight)

    def into_matrix(fill: Callable[..., None]) -> Implementation:
        return lambda t: _matrix(layer, scales, lambda rows: fill(weight, t["scales"], rows), transposed=transposed)

    return Op(
        inputs={"scales": scales},
        ours=into_matrix(ours),
        reference=into_matrix(reference_fill),
        exact=lambda t: weight.dequantise(torch.float32),
        read=either,
    )


def weight_to_e4m3(layer: Layer, *, transposed: bool) -> Op:
    """Gate or up, as it is trained, to the matrix of a product."""
    from pantheraml.kernels.trained_weight import reference_weight_to_e4m3, weight_scales
    from pantheraml.kernels.trained_weight import weight_to_e4m3 as ours

    weight = layer.normal(layer.inner, layer.width)
    scales = weight_scales([weight], layer.inner)

    def into_matrix(write: Callable[..., None], scale: Any) -> Implementation:
        return lambda t: _matrix(layer, scales, lambda rows: write(t["weight"], scale, rows), transposed=transposed)

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

    payload, scales = _quantised(layer.normal(layer.tokens, layer.inner))
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


def _turns(layer: Layer) -> Inputs:
    import torch

    angles = layer.normal(layer.tokens, layer.head_dim // 2).float()
    return {"cos": torch.cat([angles.cos()] * 2, dim=1), "sin": torch.cat([angles.sin()] * 2, dim=1)}


def rotary(layer: Layer) -> Op:
    """Query, key and value out of the merged product, the first two turned."""
    from pantheraml.kernels.rotary import reference_rotate
    from pantheraml.kernels.rotary import rotate as ours

    heads, size = (layer.heads, layer.key_heads, layer.key_heads), layer.head_dim

    def reference(t: Inputs) -> tuple[Any, ...]:
        q, k, v = t["merged"].unflatten(1, (-1, size)).split(heads, dim=1)
        return reference_rotate(q, t["cos"], t["sin"]), reference_rotate(k, t["cos"], t["sin"]), v.contiguous()

    return Op(
        inputs={"merged": layer.normal(layer.tokens, sum(heads) * size)} | _turns(layer),
        ours=lambda t: ours(t["merged"], t["cos"], t["sin"], heads=heads),
        reference=reference,
        read=lambda parts: parts,
    )


def rotary_backward(layer: Layer) -> Op:
    """The gradients of query, key and value, the first two turned back, as rows with room for adapters' columns."""
    import torch

    from pantheraml.kernels.rotary import reference_rotate
    from pantheraml.kernels.rotary import unrotate as ours

    counts = {"q": layer.heads, "k": layer.key_heads, "v": layer.key_heads}
    columns, room = sum(counts.values()) * layer.head_dim, 64

    def reference(t: Inputs) -> Any:
        q, k = (reference_rotate(t[name], t["cos"], -t["sin"]) for name in "qk")
        out = torch.empty(layer.tokens, columns + room, dtype=q.dtype, device=layer.device)
        out[:, :columns] = torch.cat([part.flatten(1) for part in (q, k, t["v"])], dim=1)
        return out

    return Op(
        inputs={name: layer.normal(layer.tokens, count, layer.head_dim) for name, count in counts.items()}
        | _turns(layer),
        ours=lambda t: ours((t["q"], t["k"], t["v"]), t["cos"], t["sin"], room=room),
        reference=reference,
        read=lambda out: (out[:, :columns],),
    )


def fp8_product(layer: Layer, *, backward: bool) -> Op:
    """The product of gate or up from e4m3 to bf16, against a product in bf16. On the way back the weight's bytes are
    transposed first."""
    import torch

    from pantheraml.kernels.fp8_product import fp8_product as ours
    from pantheraml.kernels.fp8_product import transposed
    from pantheraml.models.quantise.fp8 import FP8Linear

    weight = layer.normal(layer.inner, layer.width) * layer.width**-0.5
    packed = FP8Linear(weight, None, scales="one")
    x = layer.normal(layer.tokens, layer.inner if backward else layer.width)
    payload, scales = _quantised(x)
    side = packed.scale[: layer.width].contiguous()  # all alike

    def product(_: Inputs) -> Any:
        if backward:
            return ours(payload, scales, transposed(packed.qweight), side, torch.bfloat16)
        return ours(payload, scales, packed.qweight, packed.scale, torch.bfloat16)

    return Op(
        inputs={"x": x, "weight": weight},
        ours=product,
        reference=lambda t: t["x"] @ (t["weight"] if backward else t["weight"].T),
    )


def fp8_transposition(layer: Layer) -> Op:
    from pantheraml.kernels.fp8_product import reference_transpose, transposed

    payload, _ = _quantised(layer.normal(layer.inner, layer.width))
    return Op(
        inputs={"payload": payload},
        ours=lambda t: transposed(t["payload"]),
        reference=lambda t: reference_transpose(t["payload"]),
        exact=lambda t: t["payload"].T,
    )


def lora_project(layer: Layer) -> Op:
    """Rows of gate and up times both adapters' A."""
    import torch

    from pantheraml.kernels.lora_columns import project, segments_of, splits_for
    from pantheraml.kernels.lora_columns.reference import reference_project

    ranks, splits = 2 * layer.rank, splits_for(layer.tokens, layer.width)
    segments = segments_of([(0, layer.width, 0, ranks)], torch.device(layer.device))

    def ours(t: Inputs) -> Any:
        out = torch.empty(splits, layer.tokens, ranks, device=layer.device)
        project(t["payload"], t["factor"], segments, ranks, out)
        return out

    def reference(t: Inputs) -> Any:
        out = torch.empty(1, layer.tokens, ranks, device=layer.device)
        reference_project(t["payload"], t["factor"], segments, out)
        return out

    return Op(
        inputs={
            "payload": _quantised(layer.normal(layer.tokens, layer.width))[0],
            "factor": _quantised(layer.normal(ranks, layer.width))[0],
        },
        ours=ours,
        reference=reference,
        read=lambda out: (out.sum(0),),
    )


def lora_gradient(layer: Layer) -> Op:
    """The gradient of gate's and up's A."""
    import torch

    from pantheraml.kernels.lora_columns import Left, adapter_gradient, blocks_of
    from pantheraml.kernels.lora_columns.reference import reference_gradient, reference_left

    ranks = 2 * layer.rank
    blocks = blocks_of([(0, layer.width, 0, ranks)], torch.device(layer.device))
    payload, scales = _quantised(layer.normal(layer.tokens, layer.width))
    left = layer.normal(ranks, -(-layer.tokens // 64) * 64)
    reference_left(layer.normal(layer.tokens, ranks), scales, left)

    def run(t: Inputs, *, ours: bool) -> Any:
        out = torch.empty(ranks, layer.width, device=layer.device)
        if ours:
            adapter_gradient(Left(t["left"], lifted=True), None, t["payload"], blocks, ranks, None, out)
        else:
            reference_gradient(t["left"], None, t["payload"], blocks, None, out, lifted=True)
        return out

    return Op(
        inputs={"left": left, "payload": payload},
        ours=lambda t: run(t, ours=True),
        reference=lambda t: run(t, ours=False),
    )


def _quantised(rows: Any) -> tuple[Any, Any]:
    from pantheraml.kernels.quantise_rows import reference_quantise_rows

    return reference_quantise_rows(rows)


OPS: dict[str, Callable[[Layer], Op]] = {
    "linear_cross_entropy, frozen head": lambda layer: linear_cross_entropy(layer, trained_head=False),
    "linear_cross_entropy, trained head": lambda layer: linear_cross_entropy(layer, trained_head=True),
    "fp8_linear_cross_entropy": fp8_linear_cross_entropy,
    "fp8_product": lambda layer: fp8_product(layer, backward=False),
    "fp8_product, backward": lambda layer: fp8_product(layer, backward=True),
    "fp8_transposition": fp8_transposition,
    "lora_columns, project": lora_project,
    "lora_columns, gradient": lora_gradient,
    "rotary": rotary,
    "rotary, backward": rotary_backward,
    "quantise_rows": quantise_rows,
    "copy_rows": copy_rows,
    "rms_norm": rms_norm,
    "rms_norm_backward": rms_norm_backward,
    "rms_norm_weight_gradient": rms_norm_weight_gradient,
    "gated_activation": gated_activation,
    "gated_activation_backward": gated_activation_backward,
    "nf4_fill": lambda layer: nf4_fill(layer, transposed=False),
    "nf4_fill, transposed": lambda layer: nf4_fill(layer, transposed=True),
    "weight_scales": weight_scales,
    "weight_to_e4m3": lambda layer: weight_to_e4m3(layer, transposed=False),
    "weight_to_e4m3, transposed": lambda layer: weight_to_e4m3(layer, transposed=True),
    "turned_rows": lambda layer: turned_rows(layer, scaled=False),
    "turned_rows, scaled": lambda layer: turned_rows(layer, scaled=True),
}
