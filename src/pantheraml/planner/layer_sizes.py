"""Widths of a model's decoder layers, from the shapes of its weights."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pantheraml.planner.model_shapes import ModelShapes, Weight

_LAYER = re.compile(r"\.(?:layers|h|blocks|block)\.(\d+)\.")
_ATTENTION_OUTPUT = re.compile(r"\.(o_proj|c_proj|out_proj|dense|wo)$")


@dataclass(frozen=True)
class LayerSizes:
    layers: int
    hidden: int
    vocab: int
    queries: int
    """Width of the queries: heads x size of a head."""
    qkv: int
    """Width of queries, keys and values together."""
    inner: int
    """Width of the MLP."""
    gated: bool
    """The MLP has a gate: gate and up are `inner` wide each."""
    linear_parameters: int
    """Parameters of one layer's matrices."""
    norms: int
    """Norms of one layer as wide as the residual stream."""
    tied: bool
    head_size: int | None = None
    """None: not known, of a model read from its weight files alone."""
    normed_heads: int = 0
    """Width of the queries and keys, if norms of their heads come before RoPE."""
    window: int | None = None
    """Tokens that attention reaches in some layers or all; None: the whole document, or not known."""


def layer_sizes(shapes: ModelShapes) -> LayerSizes | None:
    """Return the sizes of a model of equal layers; None: they cannot be derived from its weights."""
    numbers = {int(found[1]) for each in shapes.weights if (found := _LAYER.search(f".{each.name}"))}
    tables = [each for each in shapes.weights if each.part == "embedding" and len(each.shape) == 2]
    if not numbers or not tables:
        return None
    table = max(tables, key=lambda each: each.shape[0])
    first = [each for each in shapes.weights if _number(each) == min(numbers)]
    linears = [each for each in first if each.linear]
    last = [each for each in shapes.weights if _number(each) == max(numbers) and each.linear]
    if sum(each.size for each in linears) != sum(each.size for each in last):
        return None
    attention = [each for each in linears if each.part == "attention"]
    outputs = [each for each in attention if _ATTENTION_OUTPUT.search(each.layer)]
    mlp = [each for each in linears if each.part == "mlp"]
    if len(outputs) != 1 or len(mlp) < 2:
        return None
    hidden = table.shape[1]
    inner = max((each for each in mlp if each.out_in[0] == hidden), key=lambda each: each.size, default=mlp[-1])
    widths = sum(each.out_in[0] for each in mlp if each is not inner)
    decoder = shapes.decoder
    norms = [each for each in first if each.part == "norms" and "bias" not in each.name]
    of_heads = any(each.layer.endswith((".q_norm", ".k_norm")) for each in norms)
    return LayerSizes(
        layers=len(numbers),
        hidden=hidden,
        vocab=table.shape[0],
        queries=outputs[0].out_in[1],
        qkv=sum(each.out_in[0] for each in attention if each is not outputs[0]),
        inner=inner.out_in[1],
        gated=widths >= 2 * inner.out_in[1],
        linear_parameters=sum(each.size for each in linears),
        norms=sum(each.shape == (hidden,) and not each.layer.endswith((".q_norm", ".k_norm")) for each in norms),
        tied=shapes.tied,
        head_size=None if decoder is None else decoder.head_dim,
        normed_heads=decoder.queries + decoder.keys if of_heads and decoder is not None else 0,
        window=shapes.window,
    )


def _number(weight: Weight) -> int | None:
    found = _LAYER.search(f".{weight.name}")
    return None if found is None else int(found[1])
