"""The definitions, in plain torch: also what runs on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from pantheraml.kernels.e4m3 import LARGEST, to_e4m3
from pantheraml.kernels.lora_columns.sides import Side

LIFT = 2.0**100
"""Of a left side that rows of e4m3 will meet: the kernel reads those as values times 2**-120, which bf16 holds."""


def reference_write(
    down: Tensor,
    up: Tensor,
    scaling: float,
    matrix_up: Tensor,
    matrix_down: Tensor,
    scales: Tensor | None,
    factor_up: Tensor,
    unit_down: Tensor,
    unit_up: Tensor,
    turned_down: Tensor | None,
) -> None:
    if scales is None:
        matrix_up.copy_(up.float() * scaling)
        matrix_down.copy_(down)
    else:
        scaled = up.float() * (scaling / scales)[:, None]
        unit_up.copy_(scaled.abs().amax(dim=0).clamp(min=1e-30) / LARGEST)
        unit_down.copy_(down.float().abs().amax(dim=1).clamp(min=1e-30) / LARGEST)
        matrix_up.copy_(to_e4m3(scaled * (1 / unit_up)))
        matrix_down.copy_(to_e4m3(down.float() * (1 / unit_down)[:, None]))
    factor_up.copy_(matrix_up.T)
    if turned_down is not None:
        turned_down.copy_(matrix_down.T)


def reference_project(payload: Tensor, factor: Tensor, segments: Tensor, out: Tensor) -> None:
    out.zero_()
    for start, width, column, rank in segments.tolist():
        span = slice(start, start + width)
        out[0, :, column : column + rank] = payload[:, span].float() @ factor[:rank, span].float().T


def reference_place(
    raw: Tensor,
    own_units: Tensor,
    other_units: Tensor,
    payload: Tensor,
    width: int,
    scales: Tensor | None,
    middle: Tensor,
) -> None:
    total = raw.sum(dim=0)
    ranks = total.shape[1]
    payload[:, width:] = torch.zeros((), dtype=payload.dtype)
    if scales is None:
        middle.copy_(total)
        payload[:, width : width + ranks] = total.to(payload.dtype)
        return
    total = total * own_units[:ranks]
    middle.copy_(total * scales[:, None])
    values = total * other_units[:ranks]
    excess = values.abs().amax(dim=1) / LARGEST
    move = torch.where(excess > 1, torch.exp2(excess.clamp(min=1e-30).log2().ceil()), 1.0)
    payload[:, :width] = to_e4m3(payload[:, :width].float() / move[:, None])
    payload[:, width : width + ranks] = to_e4m3(values / move[:, None])
    scales.mul_(move)


def reference_left(middle: Tensor, row_scales: Tensor | None, out: Tensor) -> None:
    """The first columns of `out` [ranks, rows or more]; the others are not written."""
    rows = middle.shape[0]
    out[:, :rows] = middle.T if row_scales is None else middle.T.float() * (row_scales * LIFT)


def reference_gradient(side: Side) -> None:
    """A left side that was lifted has the rows' scales in it."""
    left = side.left.rows[:, : side.payload.shape[0]].float()
    if side.left.lifted:
        left = left / LIFT
    elif side.row_scales is not None:
        left = left * side.row_scales
    for start, end, column, rank in side.blocks.tolist():
        total = left[column : column + rank] @ side.payload[:, start:end].float()
        side.out[:rank, start:end] = total if side.divisors is None else total / side.divisors[start:end]
