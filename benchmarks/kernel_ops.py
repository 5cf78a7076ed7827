"""The ops that kernels.py measures: what each computes, on what, and who else computes it.

To add one, write a function that returns its `Op`, at the full size (Llama-3.1-8B's layer, 8,192 tokens) and at a tiny
one, and put it into OPS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernel_ops_trained
from kernel_op import Implementation, Inputs, Layer, Op, e4m3_matrix, either, quantised


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
        ours=lambda t: ours(t["hidden"], t["weight"], t["targets"], target_count=layer.tokens),
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
        ours=lambda t: ours(t["hidden"], head.qweight, head.scale[0], t["targets"], target_count=layer.tokens),
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
    from pantheraml.kernels.rms_norm import rms_norm as kernel

    def plain(t: Inputs) -> Any:
        total = t["x"] + t["delta"]
        normal, inverse = reference_rms_norm(total, t["weight"], 1e-5)
        return normal, None, total, inverse

    def reference(t: Inputs) -> Any:
        normal, _, total, inverse = plain(t)
        return *reference_quantise_rows(normal), total, inverse

    def ours(t: Inputs) -> Any:
        normed = kernel(t["x"], t["weight"], 1e-5, delta=t["delta"])
        return normed.payload, normed.scales, normed.total, normed.inverse

    return Op(
        inputs={
            "x": layer.normal(layer.tokens, layer.width),
            "delta": layer.normal(layer.tokens, layer.width),
            "weight": 1 + 0.1 * layer.normal(layer.width),
        },
        ours=ours,
        reference=reference,
        exact=plain,
        read=lambda out: (*(either(out[:2]) if out[1] is not None else out[:1]), *out[2:]),
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


def nf4_fill(layer: Layer, *, transposed: bool) -> Op:
    """Gate or up from nf4 to the matrix of a product."""
    import torch

    from pantheraml.kernels.nf4 import NF4Weight
    from pantheraml.kernels.nf4_fill import nf4_fill as ours
    from pantheraml.kernels.nf4_fill import nf4_row_scales, reference_fill

    weight = NF4Weight.pack(layer.normal(layer.inner, layer.width) * layer.width**-0.5)
    scales = nf4_row_scales(weight)

    def into_matrix(fill: Callable[..., None]) -> Implementation:
        return lambda t: e4m3_matrix(layer, scales, lambda rows: fill(weight, t["scales"], rows), transposed=transposed)

    return Op(
        inputs={"scales": scales},
        ours=into_matrix(ours),
        reference=into_matrix(reference_fill),
        exact=lambda t: weight.dequantise(torch.float32),
        read=either,
    )


def nf4_descent(layer: Layer) -> Op:
    """As many tiles of gate or up as move at the same time."""
    import torch

    from pantheraml.kernels.nf4 import levels_on
    from pantheraml.kernels.nf4_descent import TILE, as_multiplied, reference_descend
    from pantheraml.kernels.nf4_descent import descend as ours

    count = layer.width // TILE
    inputs, gradients = (layer.normal(count, 4 * TILE, TILE).float() / 16 for _ in range(2))
    inputs, gradients = inputs.mT @ inputs, gradients.mT @ gradients
    codes = layer.normal(count, TILE, TILE).mul(3).add(8).clamp(0, 15).byte()
    scales = 1 + layer.normal(count, TILE, TILE).float().abs()
    levels = levels_on(codes.device)
    change = as_multiplied(levels[codes.int()] * scales) - layer.normal(count, TILE, TILE).float()
    names = ("codes", "slope", "scales", "curvature", "inputs", "gradients")
    parts = (codes, change @ inputs + gradients @ change, scales, torch.full_like(scales, 2.0), inputs, gradients)
    return Op(
        inputs=dict(zip(names, parts, strict=True)),
        ours=lambda t: ours(*t.values()),
        reference=lambda t: reference_descend(*t.values()),
        read=lambda moved: (as_multiplied(levels[moved.int()] * scales),),
        not_compiled="its 64 diagonals took more than 100 s to compile, and the run was ended",
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
    payload, scales = quantised(x)
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

    payload, _ = quantised(layer.normal(layer.inner, layer.width))
    return Op(
        inputs={"payload": payload},
        ours=lambda t: transposed(t["payload"]),
        reference=lambda t: reference_transpose(t["payload"]),
        exact=lambda t: t["payload"].T,
    )


def lora_columns(layer: Layer) -> Op:
    """Rows of gate and up times both adapters' A, written behind them."""
    import torch

    from pantheraml.kernels.lora_columns import Projection, add_columns, segments_of
    from pantheraml.kernels.lora_columns.reference import reference_place, reference_project

    ranks, room, device = 2 * layer.rank, 128, torch.device(layer.device)
    segments = segments_of([(0, layer.width, 0, ranks)], device)
    units = torch.ones(room, device=device), torch.full((room,), 1e-3, device=device)
    payload, scales = quantised(layer.normal(layer.tokens, layer.width))
    rows = torch.zeros(layer.tokens, layer.width + room, device=device).to(payload.dtype)
    rows[:, : layer.width] = payload

    def ours(t: Inputs) -> Any:
        projection = Projection(t["factor"], segments, ranks, units)
        return add_columns(t["rows"], layer.width, t["scales"], projection, torch.float32)

    def reference(t: Inputs) -> Any:
        raw = torch.empty(1, layer.tokens, ranks, device=device)
        middle = torch.empty(layer.tokens, ranks, device=device)
        reference_project(t["rows"], t["factor"], segments, raw)
        reference_place(raw, *units, t["rows"], layer.width, t["scales"], middle)
        return middle

    return Op(
        inputs={"rows": rows, "factor": quantised(layer.normal(ranks, layer.width))[0], "scales": scales},
        ours=ours,
        reference=reference,
        exact=lambda t: (t["rows"][:, : layer.width] @ t["factor"].T) * t["scales"][:, None],
    )


def lora_gradients(layer: Layer) -> Op:
    """The gradients of gate's and up's adapters."""
    import torch

    from pantheraml.kernels.lora_columns import Left, Side, adapter_gradients, blocks_of
    from pantheraml.kernels.lora_columns.reference import reference_gradient, reference_left

    device, rank, spans = torch.device(layer.device), layer.rank, []
    for start in (0, layer.inner):
        spans.append((start, layer.inner, len(spans) * rank, rank))
    sides = {"down": (layer.width, 2 * rank, [(0, layer.width, 0, 2 * rank)]), "up": (2 * layer.inner, rank, spans)}
    inputs: Inputs = {}
    for name, (width, _, _) in sides.items():
        inputs[name], scales = quantised(layer.normal(layer.tokens, width))
        inputs[f"left {name}"] = layer.normal(2 * rank, -(-layer.tokens // 64) * 64)
        reference_left(layer.normal(layer.tokens, 2 * rank), scales, inputs[f"left {name}"])
    blocks = {name: blocks_of(own, device) for name, (_, _, own) in sides.items()}

    def run(t: Inputs, *, ours: bool) -> Any:
        made = []
        for name, (width, ranks, _) in sides.items():
            out = torch.empty(ranks, width, device=device)
            made.append(Side(Left(t[f"left {name}"], True), None, t[name], blocks[name], ranks, None, out))
        if ours:
            adapter_gradients(*made)
        else:
            for side in made:
                reference_gradient(side)
        return [side.out for side in made]

    return Op(
        inputs=inputs,
        ours=lambda t: run(t, ours=True),
        reference=lambda t: run(t, ours=False),
        read=lambda out: tuple(out),
    )


OPS: dict[str, Callable[[Layer], Op]] = {
    "linear_cross_entropy, frozen head": lambda layer: linear_cross_entropy(layer, trained_head=False),
    "linear_cross_entropy, trained head": lambda layer: linear_cross_entropy(layer, trained_head=True),
    "fp8_linear_cross_entropy": fp8_linear_cross_entropy,
    "fp8_product": lambda layer: fp8_product(layer, backward=False),
    "fp8_product, backward": lambda layer: fp8_product(layer, backward=True),
    "fp8_transposition": fp8_transposition,
    "lora_columns": lora_columns,
    "lora_columns, gradients": lora_gradients,
    "rotary": rotary,
    "rotary, backward": rotary_backward,
    "quantise_rows": quantise_rows,
    "copy_rows": copy_rows,
    "rms_norm": rms_norm,
    "rms_norm_backward": rms_norm_backward,
    "gated_activation": gated_activation,
    "gated_activation_backward": gated_activation_backward,
    "nf4_fill": lambda layer: nf4_fill(layer, transposed=False),
    "nf4_fill, transposed": lambda layer: nf4_fill(layer, transposed=True),
    "nf4_descent": nf4_descent,
    **kernel_ops_trained.OPS,
}
