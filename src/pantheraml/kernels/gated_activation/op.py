"""The gated activation of an MLP, from one product's output to the next one's e4m3 input, and back.

The backward pass writes both things it is asked for while its inputs are at hand: the gradient of gate and up, ready
for the product that takes it on, and the hidden rows again, which the adapter's gradient needs. So the forward pass
need not keep them (14 KB a token in Llama-3.1-8B's shape).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pantheraml.kernels.dispatch import runs_triton
from pantheraml.kernels.e4m3 import E4M3
from pantheraml.kernels.gated_activation.reference import reference_gated, reference_gated_backward
from pantheraml.kernels.quantise_rows.reference import reference_quantise_rows


class Rows(NamedTuple):
    payload: Tensor
    """[rows, columns + room]; the room is not written."""
    scales: Tensor | None
    """Of e4m3 rows."""


def gated_activation(pair: Tensor, *, room: int = 0, gelu: bool = False, quantise: bool = True) -> Rows:
    """activation(gate) * up of `pair` [rows, gate | up], as e4m3 or in its own dtype."""
    rows, columns = pair.shape[0], pair.shape[1] // 2
    out = _empty(rows, columns + room, pair, quantise)
    if not runs_triton(pair):
        hidden = reference_gated(pair, gelu=gelu)
        return _fill(out, columns, hidden, None, quantise)
    from pantheraml.kernels.gated_activation import triton_kernel

    scales = torch.empty(rows, dtype=torch.float32, device=pair.device) if quantise else None
    triton_kernel.forward(pair, out, scales, gelu)
    return Rows(out, scales)


def gated_activation_backward(
    g: Tensor,
    pair: Tensor,
    *,
    multiplier: Tensor | None = None,
    rooms: tuple[int, int] = (0, 0),
    gelu: bool = False,
    quantise: bool = True,
    in_place: bool = False,
) -> tuple[Rows, Rows]:
    """The hidden rows (with `rooms[0]`), and the gradient of `pair` times `multiplier`, if given (with `rooms[1]`).

    Both as e4m3, or in pair's dtype; then there is no multiplier, and `in_place`, without rooms, the hidden rows are
    written over g and the gradient over pair.
    """
    rows, columns = g.shape
    if in_place:
        if quantise or any(rooms) or not (g.is_contiguous() and g.dtype == pair.dtype):
            raise ValueError("only rows of one dtype, without rooms, can be written over what they are made of")
        hidden, out = g, pair
    else:
        hidden = _empty(rows, columns + rooms[0], pair, quantise)
        out = _empty(rows, 2 * columns + rooms[1], pair, quantise)
    if not runs_triton(pair):
        again, gradient = reference_gated(pair, gelu=gelu), reference_gated_backward(g, pair, gelu=gelu)
        return (
            _fill(hidden, columns, again, None, quantise),
            _fill(out, 2 * columns, gradient, multiplier, quantise),
        )
    from pantheraml.kernels.gated_activation import triton_kernel

    # not two halves of one: products want scales that begin at a multiple of 16 bytes, whatever the number of rows
    hidden_scales, scales = (
        torch.empty(rows, dtype=torch.float32, device=pair.device) if quantise else None for _ in range(2)
    )
    triton_kernel.backward(g.contiguous(), pair, multiplier, hidden, hidden_scales, out, scales, gelu)
    return Rows(hidden, hidden_scales), Rows(out, scales)


def _empty(rows: int, columns: int, like: Tensor, quantise: bool) -> Tensor:
    return torch.empty(rows, columns, dtype=E4M3 if quantise else like.dtype, device=like.device)


def _fill(out: Tensor, columns: int, values: Tensor, multiplier: Tensor | None, quantise: bool) -> Rows:
    if not quantise:
        out[:, :columns] = values
        return Rows(out, None)
    out[:, :columns], scales = reference_quantise_rows(values, multiplier)
    return Rows(out, scales)
