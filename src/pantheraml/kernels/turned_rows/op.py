"""The gradient of a weight is a product over rows: g transposed times x. The tensor cores want both sides of an fp8
product laid out along the inner dimension, so both are turned over.

A product takes scales from its outer dimensions alone, and those of the rows are not among them any more. So on one of
the two sides they are taken into the values, along with those of the other side's rows, and the columns get scales of
their own. All are powers of two, so that moves exponents and rounds nothing, but for values that get too small beside
the largest of their column.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pantheraml.kernels.dispatch import runs_triton
from pantheraml.kernels.e4m3 import E4M3
from pantheraml.kernels.turned_rows.reference import reference_turned_rows

DIVISOR = 16
"""Of the inner dimension of an fp8 product."""


def turned_rows(payload: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """`payload` e4m3 [rows, columns] as [columns, rows and zeros up to a multiple of 16], each row times its factor.

    `factors` [rows] float32 are powers of two; then scales [columns] float32 come with the result, powers of two as
    well, which bring each column just within e4m3's range: NaN if the column has one. `payload` may have any row
    stride; columns are a multiple of 16.
    """
    rows, columns = payload.shape
    out = torch.empty(columns, -(-rows // DIVISOR) * DIVISOR, dtype=E4M3, device=payload.device)
    if not runs_triton(payload) or not rows:
        return out, reference_turned_rows(payload, factors, out)
    from pantheraml.kernels.turned_rows import triton_kernel

    scales = None if factors is None else torch.empty(columns, dtype=torch.float32, device=payload.device)
    triton_kernel.turn(payload if triton_kernel.aligned(payload) else payload.contiguous(), factors, out, scales)
    return out, scales
