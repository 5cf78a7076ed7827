"""Operands of the adapter-gradient matmuls."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LeftOperand(NamedTuple):
    """Left operand of an adapter gradient, transposed."""

    rows: Tensor
    """[ranks, padded rows]: x A' or s g B, transposed."""
    prescaled: bool
    """Whether it is already multiplied by the row scales of the e4m3 right operand, and by `PRESCALE`."""


class GradMatmul(NamedTuple):
    """Gradient of the A's or B's of a group: for each block, out[:rank, start:end] = left[block's columns] @ (qdata *
    row_scales)[:, start:end], divided by `divisors` [width] if given."""

    left: LeftOperand
    row_scales: Tensor | None
    qdata: Tensor
    blocks: Tensor
    rank: int
    """Largest rank of any block."""
    divisors: Tensor | None
    out: Tensor
