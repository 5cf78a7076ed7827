"""Ops measured by kernels.py: inputs, our implementation, the reference and other libraries.

To add one, write a function that returns its `Op` for a `Layer` (full size: a Llama-3.1-8B layer with 8,192 tokens) and
add it to OPS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernel_ops_heads
import kernel_ops_trained
from kernel_op import Implementation, Inputs, Layer, Op, e4m3_matrix, either, quantized


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
    """Frozen e4m3 head against the same head in bf16."""
    from pantheraml.kernels.linear_cross_entropy import fp8_linear_cross_entropy as ours
    from pantheraml.kernels.linear_cross_entropy import reference_linear_cross_entropy as reference
    from pantheraml.models.quantize.fp8 import FP8Linear

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


def quantize_rows(layer: Layer) -> Op:
    from pantheraml.kernels.fp8.quantize_rows import quantize_rows as ours
    from pantheraml.kernels.fp8.quantize_rows import reference_quantize_rows as reference

    return Op(
        inputs={"x": layer.normal(layer.tokens, layer.width)},
        ours=lambda t: ours(t["x"]),
        reference=lambda t: reference(t["x"]),
        exact=lambda t: t["x"],
        read=either,
    )


def copy_rows(layer: Layer) -> Op:
    """Rows padded for adapter columns: the bf16 counterpart of `quantize_rows`."""
    import torch

    from pantheraml.kernels.fp8.quantize_rows import copy_rows as ours

    pad_cols = 64

    def reference(t: Inputs) -> Any:
        out = torch.empty(layer.tokens, layer.width + pad_cols, dtype=t["x"].dtype, device=layer.device)
        out[:, : layer.width] = t["x"]
        return out

    return Op(
        inputs={"x": layer.normal(layer.tokens, layer.width)},
        ours=lambda t: ours(t["x"], pad_cols=pad_cols, dtype=t["x"].dtype),
        reference=reference,
        read=lambda out: (out[:, : layer.width],),
    )


def rms_norm(layer: Layer) -> Op:
    """Residual addition, RMSNorm and quantization before a layer's matmuls."""
    from pantheraml.kernels.fp8.quantize_rows import reference_quantize_rows
    from pantheraml.kernels.rms_norm import reference_rms_norm
    from pantheraml.kernels.rms_norm import rms_norm as kernel

    def plain(t: Inputs) -> Any:
        total = t["x"] + t["delta"]
        normal, inverse = reference_rms_norm(total, t["weight"], 1e-5)
        return normal, None, total, inverse

    def reference(t: Inputs) -> Any:
        normal, _, total, inverse = plain(t)
        return *reference_quantize_rows(normal), total, inverse

    def ours(t: Inputs) -> Any:
        normed = kernel(t["x"], t["weight"], 1e-5, delta=t["delta"])
        return normed.qdata, normed.scales, normed.total, normed.inverse

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
    """RMSNorm gradient from its e4m3 output, plus the same rows quantized for the backward matmul of the layer before
    the residual addition."""
    from pantheraml.kernels.fp8.e4m3 import E4M3
    from pantheraml.kernels.fp8.quantize_rows import reference_quantize_rows
    from pantheraml.kernels.rms_norm import QuantizedRows, reference_rms_norm_backward_quantized
    from pantheraml.kernels.rms_norm import rms_norm_backward_rows as ours

    def plain(t: Inputs) -> Any:
        return reference_rms_norm_backward_quantized(
            t["g"], t["qdata"], t["scales"], t["weight"], t["inverse"], residual=t["residual"]
        )

    def fused(t: Inputs) -> Any:
        x = QuantizedRows(t["qdata"], t["scales"])
        return ours(t["g"], x, t["weight"], t["inverse"], residual=t["residual"], dtype=E4M3)

    def reference(t: Inputs) -> tuple[Any, ...]:
        dx = plain(t)
        return dx, *reference_quantize_rows(dx)

    qdata, scales = reference_quantize_rows(layer.normal(layer.tokens, layer.width))
    return Op(
        inputs={
            "g": layer.normal(layer.tokens, layer.width),
            "qdata": qdata,
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
    """SiLU(gate) * up, quantized for the down projection."""
    from pantheraml.kernels.fp8.quantize_rows import reference_quantize_rows
    from pantheraml.kernels.gated_activation import gated_activation as ours
    from pantheraml.kernels.gated_activation import reference_gated

    return Op(
        inputs={"pair": layer.normal(layer.tokens, 2 * layer.inner)},
        ours=lambda t: ours(t["pair"]),
        reference=lambda t: reference_quantize_rows(reference_gated(t["pair"])),
        exact=lambda t: reference_gated(t["pair"]),
        read=either,
    )


def gated_activation_backward(layer: Layer) -> Op:
    """Recomputed hidden rows and the gradient of gate and up, both quantized."""
    from pantheraml.kernels.fp8.quantize_rows import reference_quantize_rows
    from pantheraml.kernels.gated_activation import gated_activation_backward as ours
    from pantheraml.kernels.gated_activation import reference_gated, reference_gated_backward

    def plain(t: Inputs) -> tuple[Any, Any]:
        return reference_gated(t["pair"]), reference_gated_backward(t["g"], t["pair"])

    def reference(t: Inputs) -> tuple[Any, Any]:
        hidden, gradient = plain(t)
        return reference_quantize_rows(hidden), reference_quantize_rows(gradient, t["multiplier"])

    return Op(
        inputs={
            "g": layer.normal(layer.tokens, layer.inner),
            "pair": layer.normal(layer.tokens, 2 * layer.inner),
            "multiplier": (1 + layer.normal(2 * layer.inner).abs()).float(),
        },
        ours=lambda t: ours(t["g"], t["pair"], multiplier=t["multiplier"], pad_cols=(0, 0)),
        reference=reference,
        exact=lambda t: (plain(t)[0], plain(t)[1] * t["multiplier"]),
        read=lambda both: (*either(both[0]), *either(both[1])),
    )


def nf4_to_fp8(layer: Layer, *, transposed: bool) -> Op:
    """Convert gate or up from NF4 to the e4m3 operand of a matmul."""
    import torch

    from pantheraml.kernels.nf4.format import NF4Weight
    from pantheraml.kernels.nf4.to_fp8 import nf4_row_scales, reference_nf4_to_fp8
    from pantheraml.kernels.nf4.to_fp8 import nf4_to_fp8 as ours

    weight = NF4Weight.quantize(layer.normal(layer.inner, layer.width) * layer.width**-0.5)
    scales = nf4_row_scales(weight)

    def into_matrix(fill: Callable[..., None]) -> Implementation:
        return lambda t: e4m3_matrix(layer, scales, lambda rows: fill(weight, t["scales"], rows), transposed=transposed)

    return Op(
        inputs={"scales": scales},
        ours=into_matrix(ours),
        reference=into_matrix(reference_nf4_to_fp8),
        exact=lambda t: weight.dequantize(torch.float32),
        read=either,
    )


def nf4_descent(layer: Layer) -> Op:
    """As many tiles of gate or up as are processed at once."""
    import torch

    from pantheraml.kernels.nf4.descent import TILE, effective_weight, reference_nf4_descent
    from pantheraml.kernels.nf4.descent import nf4_descent as ours
    from pantheraml.kernels.nf4.format import levels_on

    count = layer.width // TILE
    inputs, gradients = (layer.normal(count, 4 * TILE, TILE).float() / 16 for _ in range(2))
    inputs, gradients = inputs.mT @ inputs, gradients.mT @ gradients
    codes = layer.normal(count, TILE, TILE).mul(3).add(8).clamp(0, 15).byte()
    scales = 1 + layer.normal(count, TILE, TILE).float().abs()
    levels = levels_on(codes.device)
    change = effective_weight(levels[codes.int()] * scales) - layer.normal(count, TILE, TILE).float()
    names = ("codes", "slope", "scales", "curvature", "inputs", "gradients")
    parts = (codes, change @ inputs + gradients @ change, scales, torch.full_like(scales, 2.0), inputs, gradients)
    return Op(
        inputs=dict(zip(names, parts, strict=True)),
        ours=lambda t: ours(*t.values()),
        reference=lambda t: reference_nf4_descent(*t.values()),
        read=lambda moved: (effective_weight(levels[moved.int()] * scales),),
        not_compiled="compiling its 64 diagonals took more than 100 s and was aborted",
    )


def _cos_sin(layer: Layer) -> Inputs:
    import torch

    angles = layer.normal(layer.tokens, layer.head_dim // 2).float()
    return {"cos": torch.cat([angles.cos()] * 2, dim=1), "sin": torch.cat([angles.sin()] * 2, dim=1)}


def rotary(layer: Layer) -> Op:
    """Split the merged QKV output and apply RoPE to query and key."""
    from pantheraml.kernels.rotary import reference_rope
    from pantheraml.kernels.rotary import rope_forward as ours

    heads, size = (layer.heads, layer.key_heads, layer.key_heads), layer.head_dim

    def reference(t: Inputs) -> tuple[Any, ...]:
        q, k, v = t["merged"].unflatten(1, (-1, size)).split(heads, dim=1)
        return reference_rope(q, t["cos"], t["sin"]), reference_rope(k, t["cos"], t["sin"]), v.contiguous()

    return Op(
        inputs={"merged": layer.normal(layer.tokens, sum(heads) * size)} | _cos_sin(layer),
        ours=lambda t: ours(t["merged"], t["cos"], t["sin"], heads=heads),
        reference=reference,
        read=lambda parts: parts,
    )


def rotary_backward(layer: Layer) -> Op:
    """RoPE backward of query, key and value gradients, as rows padded for adapter columns."""
    import torch

    from pantheraml.kernels.rotary import reference_rope
    from pantheraml.kernels.rotary import rope_backward as ours

    counts = {"q": layer.heads, "k": layer.key_heads, "v": layer.key_heads}
    columns, pad_cols = sum(counts.values()) * layer.head_dim, 64

    def reference(t: Inputs) -> Any:
        q, k = (reference_rope(t[name], t["cos"], -t["sin"]) for name in "qk")
        out = torch.empty(layer.tokens, columns + pad_cols, dtype=q.dtype, device=layer.device)
        out[:, :columns] = torch.cat([part.flatten(1) for part in (q, k, t["v"])], dim=1)
        return out

    return Op(
        inputs={name: layer.normal(layer.tokens, count, layer.head_dim) for name, count in counts.items()}
        | _cos_sin(layer),
        ours=lambda t: ours((t["q"], t["k"], t["v"]), t["cos"], t["sin"], pad_cols=pad_cols),
        reference=reference,
        read=lambda out: (out[:, :columns],),
    )


def fp8_matmul(layer: Layer, *, backward: bool) -> Op:
    """fp8 matmul of gate or up with bf16 output, against a bf16 matmul. Backward includes the transpose of the weight's
    bytes."""
    import torch

    from pantheraml.kernels.fp8.matmul import fp8_matmul as ours
    from pantheraml.kernels.fp8.matmul import transposed
    from pantheraml.models.quantize.fp8 import FP8Linear

    weight = layer.normal(layer.inner, layer.width) * layer.width**-0.5
    quantized_linear = FP8Linear(weight, None, scales="one")
    x = layer.normal(layer.tokens, layer.inner if backward else layer.width)
    qdata, scales = quantized(x)
    weight_scales_t = quantized_linear.scale[: layer.width].contiguous()  # all alike

    def matmul(_: Inputs) -> Any:
        if backward:
            return ours(qdata, scales, transposed(quantized_linear.qweight), weight_scales_t, torch.bfloat16)
        return ours(qdata, scales, quantized_linear.qweight, quantized_linear.scale, torch.bfloat16)

    return Op(
        inputs={"x": x, "weight": weight},
        ours=matmul,
        reference=lambda t: t["x"] @ (t["weight"] if backward else t["weight"].T),
    )


def fp8_transposition(layer: Layer) -> Op:
    from pantheraml.kernels.fp8.matmul import reference_transpose, transposed

    qdata, _ = quantized(layer.normal(layer.inner, layer.width))
    return Op(
        inputs={"qdata": qdata},
        ours=lambda t: transposed(t["qdata"]),
        reference=lambda t: reference_transpose(t["qdata"]),
        exact=lambda t: t["qdata"].T,
    )


def lora_columns(layer: Layer) -> Op:
    """Project the input of gate and up with both adapters' A, and append the columns."""
    import torch

    from pantheraml.kernels.lora_columns import Projection, add_columns, segment_table
    from pantheraml.kernels.lora_columns.reference import reference_place, reference_project

    ranks, pad_cols, device = 2 * layer.rank, 128, torch.device(layer.device)
    segments = segment_table([(0, layer.width, 0, ranks)], device)
    units = torch.ones(pad_cols, device=device), torch.full((pad_cols,), 1e-3, device=device)
    qdata, scales = quantized(layer.normal(layer.tokens, layer.width))
    rows = torch.zeros(layer.tokens, layer.width + pad_cols, device=device).to(qdata.dtype)
    rows[:, : layer.width] = qdata

    def ours(t: Inputs) -> Any:
        projection = Projection(t["factor"], segments, ranks, units)
        return add_columns(t["rows"], layer.width, t["scales"], projection, torch.float32)

    def reference(t: Inputs) -> Any:
        raw = torch.empty(1, layer.tokens, ranks, device=device)
        lora_mid = torch.empty(layer.tokens, ranks, device=device)
        reference_project(t["rows"], t["factor"], segments, raw)
        reference_place(raw, *units, t["rows"], layer.width, t["scales"], lora_mid)
        return lora_mid

    return Op(
        inputs={"rows": rows, "factor": quantized(layer.normal(ranks, layer.width))[0], "scales": scales},
        ours=ours,
        reference=reference,
        exact=lambda t: (t["rows"][:, : layer.width] @ t["factor"].T) * t["scales"][:, None],
    )


def lora_gradients(layer: Layer) -> Op:
    """Gradients of the adapters of gate and up."""
    import torch

    from pantheraml.kernels.lora_columns import GradMatmul, LeftOperand, adapter_gradients, block_table
    from pantheraml.kernels.lora_columns.reference import reference_gradient, reference_left_operand

    device, rank, up_segments = torch.device(layer.device), layer.rank, []
    for start in (0, layer.inner):
        up_segments.append((start, layer.inner, len(up_segments) * rank, rank))
    operands = {
        "down": (layer.width, 2 * rank, [(0, layer.width, 0, 2 * rank)]),
        "up": (2 * layer.inner, rank, up_segments),
    }
    inputs: Inputs = {}
    for name, (width, _, _) in operands.items():
        inputs[name], scales = quantized(layer.normal(layer.tokens, width))
        inputs[f"left {name}"] = layer.normal(2 * rank, -(-layer.tokens // 64) * 64)
        reference_left_operand(layer.normal(layer.tokens, 2 * rank), scales, inputs[f"left {name}"])
    blocks = {name: block_table(own, device) for name, (_, _, own) in operands.items()}

    def run(t: Inputs, *, ours: bool) -> Any:
        matmuls = []
        for name, (width, ranks, _) in operands.items():
            out = torch.empty(ranks, width, device=device)
            matmuls.append(
                GradMatmul(LeftOperand(t[f"left {name}"], True), None, t[name], blocks[name], ranks, None, out)
            )
        if ours:
            adapter_gradients(*matmuls)
        else:
            for matmul in matmuls:
                reference_gradient(matmul)
        return [matmul.out for matmul in matmuls]

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
    "fp8_matmul": lambda layer: fp8_matmul(layer, backward=False),
    "fp8_matmul, backward": lambda layer: fp8_matmul(layer, backward=True),
    "fp8_transposition": fp8_transposition,
    "lora_columns": lora_columns,
    "lora_columns, gradients": lora_gradients,
    "rotary": rotary,
    "rotary, backward": rotary_backward,
    **kernel_ops_heads.OPS,
    "quantize_rows": quantize_rows,
    "copy_rows": copy_rows,
    "rms_norm": rms_norm,
    "rms_norm_backward": rms_norm_backward,
    "gated_activation": gated_activation,
    "gated_activation_backward": gated_activation_backward,
    "nf4_to_fp8": lambda layer: nf4_to_fp8(layer, transposed=False),
    "nf4_to_fp8, transposed": lambda layer: nf4_to_fp8(layer, transposed=True),
    "nf4_descent": nf4_descent,
    **kernel_ops_trained.OPS,
}
