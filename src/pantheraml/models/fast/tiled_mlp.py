"""The part of a layer after attention, over long sequences in tiles of rows.

Everything after attention works row by row: output projection, norm, MLP. With activation checkpointing a layer's
activations live for one backward alone, and for long sequences those of the MLP, some 130 KB per token in the shape of
Llama-3.1-8B, are most of the peak. So forward computes tile after tile, and backward recomputes one tile and
differentiates it before the next. The recomputation of the whole layer skips this part: its output is known. The
matmuls are the same as without tiles, each in pieces; gradients of adapters are summed over tiles in float32.

Sequences are tiled from two tiles on, where at least half of that memory is saved, and only if the MLP is the larger
part of a layer: otherwise attention determines the peak. Without gradients nothing is saved, and any long sequence is
tiled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pantheraml.models.fast.autograd_functions import (
    AfterAttention,
    after_attention_whole,
    in_lean_checkpoint,
    is_recomputing,
    owned_activations,
    parameters_of,
)
from pantheraml.models.fast.linear_groups import LoraGroup

TILE = 16_384
"""Rows of a tile: matmuls of so many rows are as fast per row as larger ones."""


def after_attention(x: Tensor, attn_out: Tensor, rest: AfterAttention) -> Tensor:
    """Run the part of a layer after attention, in tiles where that saves memory."""
    if not is_tiled(x, attn_out, rest):
        return after_attention_whole(x, attn_out, rest)
    if not torch.is_grad_enabled():
        return _forward(x, attn_out, rest)
    out: Tensor = _Tiled.apply(x, attn_out, rest, *parameters_of(rest.groups))
    return out


def is_tiled(x: Tensor, attn_out: Tensor, rest: AfterAttention) -> bool:
    if x.shape[0] < 2 * TILE:
        return False
    if not torch.is_grad_enabled():
        return True
    return (
        in_lean_checkpoint()
        and all(isinstance(group, LoraGroup) for group in rest.groups)
        and not (rest.norm is not None and rest.norm.weight.requires_grad)
        and is_wider(rest.groups[1], rest.groups[2], attn_out.shape[1])
    )


def is_wider(first: Any, second: Any, attention: int) -> bool:
    """Return whether the MLP's activations, gate and up and hidden rows, are more than those of attention: queries,
    keys, values and output, each at most `attention` wide. Each has a gradient of its size."""
    width: int = first.height + second.width
    return width > 4 * attention


def _tiles(rows: int) -> list[slice]:
    """Return equal tiles, the last one being shorter by a few rows."""
    count = -(-rows // TILE)
    size = -(-rows // count)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _forward(x: Tensor, attn_out: Tensor, rest: AfterAttention) -> Tensor:
    out = torch.empty_like(x)
    for rows in _tiles(len(x)):
        out[rows] = after_attention_whole(x[rows], attn_out[rows], rest)
    return out


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, attn_out: Tensor, rest: AfterAttention, *_parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x, attn_out)
        ctx.rest = rest
        return torch.zeros_like(x) if is_recomputing() else _forward(x, attn_out, rest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, attn_out = ctx.saved_tensors
        rest: AfterAttention = ctx.rest
        parameters = parameters_of(rest.groups)
        d_x, d_attn_out = torch.empty_like(x), torch.empty_like(attn_out)
        sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters]
        for rows in _tiles(len(x)):
            inputs = [part[rows].detach().requires_grad_() for part in (x, attn_out)]
            with torch.enable_grad(), owned_activations():
                out = after_attention_whole(inputs[0], inputs[1], rest)
            d_x[rows], d_attn_out[rows], *gradients = torch.autograd.grad(out, [*inputs, *parameters], grads[0][rows])
            del out
            for total, gradient in zip(sums, gradients, strict=True):
                total.add_(gradient)
        own = [total.to(parameter.dtype) for total, parameter in zip(sums, parameters, strict=True)]
        return d_x, d_attn_out, None, *own
