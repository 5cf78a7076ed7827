"""Ops measured by kernels.py: RMSNorm of query and key heads with RoPE, as in Qwen3.

The heads of the layer shape are those of Qwen3-4B.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernel_op import Inputs, Layer, Op


def _inputs(layer: Layer) -> dict[str, Any]:
    import torch

    angles = 6 * torch.rand(layer.tokens, layer.head_dim // 2, device=layer.device)
    cos, sin = (torch.cat([table] * 2, 1).bfloat16() for table in (angles.cos(), angles.sin()))
    weights = {name: 1 + 0.1 * layer.normal(layer.head_dim) for name in ("q_weight", "k_weight")}
    columns = (layer.heads + 2 * layer.key_heads) * layer.head_dim
    return {"merged": layer.normal(layer.tokens, columns), "cos": cos, "sin": sin, **weights}


def _norms(t: Inputs) -> Any:
    from pantheraml.kernels.head_norm_rope import HeadNorms

    return HeadNorms(t["q_weight"], t["k_weight"], 1e-6, False)


def _heads(layer: Layer) -> tuple[int, int, int]:
    return layer.heads, layer.key_heads, layer.key_heads


def forward(layer: Layer) -> Op:
    """Split the merged QKV output; normalize query and key heads, and apply RoPE."""
    from pantheraml.kernels.head_norm_rope import head_norm_rope, reference_head_norm_rope

    heads, size = _heads(layer), layer.head_dim

    def reference(t: Inputs) -> tuple[Any, ...]:
        q, k, v = t["merged"].unflatten(1, (-1, size)).split(heads, dim=1)
        q, k = (
            reference_head_norm_rope(part, t[weight], 1e-6, t["cos"], t["sin"])[0]
            for part, weight in ((q, "q_weight"), (k, "k_weight"))
        )
        return q, k, v.contiguous()

    return Op(
        inputs=_inputs(layer),
        ours=lambda t: head_norm_rope(t["merged"], _norms(t), t["cos"], t["sin"], heads=heads)[:3],
        reference=reference,
        read=lambda parts: parts,
    )


def backward(layer: Layer, *, quantize: bool) -> Op:
    """Gradient of the merged QKV output from those of query, key and value, from the heads' outputs. `quantize`: to
    e4m3 rows."""
    import torch

    from pantheraml.kernels.fp8.quantize_rows import reference_quantize_rows
    from pantheraml.kernels.head_norm_rope import head_norm_rope, head_norm_rope_backward
    from pantheraml.kernels.head_norm_rope.reference import reference_head_norm_rope_backward

    given, heads = _inputs(layer), _heads(layer)
    rows = head_norm_rope(given["merged"], _norms(given), given["cos"], given["sin"], heads=heads)
    inverses = rows.inverse.split(heads[:2], dim=1)
    gradients = {
        name: layer.normal(layer.tokens, count, layer.head_dim) for name, count in zip("qkv", heads, strict=True)
    }

    def plain(t: Inputs) -> Any:
        parts = [
            reference_head_norm_rope_backward(
                t[name], saved, inverse, t[weight].float(), t["cos"], t["sin"], from_output=True
            )[0]
            for name, saved, inverse, weight in zip("qk", rows.saved, inverses, ("q_weight", "k_weight"), strict=True)
        ]
        return torch.cat([part.flatten(1).to(t["v"].dtype) for part in (*parts, t["v"])], dim=1)

    def ours(t: Inputs) -> Any:
        found = head_norm_rope_backward(
            (t["q"], t["k"], t["v"]), rows.saved, rows.inverse, _norms(t), t["cos"], t["sin"], quantize=quantize
        )
        return found[:2] if quantize else found.rows

    def read(result: Any) -> tuple[Any, ...]:
        return (result[0].float() * result[1][:, None],) if isinstance(result, tuple) else (result,)

    inputs = gradients | {name: value for name, value in given.items() if name != "merged"}
    reference = (lambda t: reference_quantize_rows(plain(t))) if quantize else plain
    return Op(inputs=inputs, ours=ours, reference=reference, exact=plain, read=read)


OPS: dict[str, Callable[[Layer], Op]] = {
    "head_norm_rope": forward,
    "head_norm_rope, backward": lambda layer: backward(layer, quantize=False),
    "head_norm_rope, backward to e4m3": lambda layer: backward(layer, quantize=True),
}
