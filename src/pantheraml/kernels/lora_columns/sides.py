"""What the kernels of the adapters' gradients are given."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Left(NamedTuple):
    """The adapters' side of a gradient, as its kernel reads it."""

    rows: Tensor
    """[ranks, rows or more]: x A' or s g B, turned over."""
    lifted: bool
    """Times the scales of the e4m3 rows that it will meet, and `LIFT`."""


class Side(NamedTuple):
    """A gradient of adapters, of A or of B: for each block out[:rank, start:end] = left[its columns] @ (payload *
    row_scales)[:, start:end], over `divisors` [width] where given."""

    left: Left
    row_scales: Tensor | None
    payload: Tensor
    blocks: Tensor
    rank: int
    """The largest."""
    divisors: Tensor | None
    out: Tensor
