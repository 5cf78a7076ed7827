"""Gated activation of an MLP, from the output of the gate/up matmul to the e4m3 operand of the down matmul, and back.

The backward pass writes two results in one pass over its inputs: the gradient of gate and up, as the operand of the
next backward matmul, and the recomputed hidden rows, which the adapter's gradient needs. So the forward pass need not
save them (14 KB per token in Llama-3.1-8B's shape).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pantheraml.kernels.dispatch import runs_triton
from pantheraml.kernels.fp8.e4m3 import E4M3
from pantheraml.kernels.fp8.quantize_rows.reference import reference_quantize_rows
from pantheraml.kernels.gated_activation.reference import reference_gated, reference_gated_backward


class GatedRows(NamedTuple):
    qdata: Tensor
    """[rows, columns + pad_cols]; the padding is uninitialized."""
    scales: Tensor | None
    """Row scales of e4m3 rows."""


def gated_activation(pair: Tensor, *, pad_cols: int = 0, gelu: bool = False, quantize: bool = True) -> GatedRows:
    """Compute activation(gate) * up of `pair` [rows, gate | up], as e4m3 or in its own dtype."""
    rows, columns = pair.shape[0], pair.shape[1] // 2
    out = _empty(rows, columns + pad_cols, pair, quantize)
    if not runs_triton(pair):
        hidden = reference_gated(pair, gelu=gelu)
        return _fill_rows(out, columns, hidden, None, quantize)
    from pantheraml.kernels.gated_activation import triton_kernel

    scales = torch.empty(rows, dtype=torch.float32, device=pair.device) if quantize else None
    triton_kernel.forward(pair, out, scales, gelu)
    return GatedRows(out, scales)


def gated_activation_backward(
    g: Tensor,
    pair: Tensor,
    *,
    multiplier: Tensor | None = None,
    pad_cols: tuple[int, int] = (0, 0),
    gelu: bool = False,
    quantize: bool = True,
    in_place: bool = False,
) -> tuple[GatedRows, GatedRows]:
    """Recompute the hidden rows and compute the gradient of `pair` (times `multiplier`), padded by `pad_cols[0]` and
    `pad_cols[1]` columns.

    Both are e4m3, or in pair's dtype without a multiplier. With `in_place` (unquantized, no padding), the hidden rows
    overwrite g and the gradient overwrites pair.
    """
    rows, columns = g.shape
    if in_place:
        if quantize or any(pad_cols) or not (g.is_contiguous() and g.dtype == pair.dtype):
            raise ValueError("in_place requires unquantized, contiguous rows of one dtype, without padding")
        hidden, out = g, pair
    else:
        hidden = _empty(rows, columns + pad_cols[0], pair, quantize)
        out = _empty(rows, 2 * columns + pad_cols[1], pair, quantize)
    if not runs_triton(pair):
        hidden_rows, gradient = reference_gated(pair, gelu=gelu), reference_gated_backward(g, pair, gelu=gelu)
        return (
            _fill_rows(hidden, columns, hidden_rows, None, quantize),
            _fill_rows(out, 2 * columns, gradient, multiplier, quantize),
        )
    from pantheraml.kernels.gated_activation import triton_kernel

    # Two allocations, not halves of one: matmuls need 16-byte aligned scales for any number of rows.
    hidden_scales, scales = (
        torch.empty(rows, dtype=torch.float32, device=pair.device) if quantize else None for _ in range(2)
    )
    triton_kernel.backward(g.contiguous(), pair, multiplier, hidden, hidden_scales, out, scales, gelu)
    return GatedRows(hidden, hidden_scales), GatedRows(out, scales)


def _empty(rows: int, columns: int, like: Tensor, quantize: bool) -> Tensor:
    return torch.empty(rows, columns, dtype=E4M3 if quantize else like.dtype, device=like.device)


def _fill_rows(out: Tensor, columns: int, values: Tensor, multiplier: Tensor | None, quantize: bool) -> GatedRows:
    if not quantize:
        out[:, :columns] = values
        return GatedRows(out, None)
    out[:, :columns], scales = reference_quantize_rows(values, multiplier)
    return GatedRows(out, scales)
