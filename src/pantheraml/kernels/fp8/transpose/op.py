"""Transpose e4m3 rows, optionally folding row scales into the values.

The gradient of a weight, g.T @ x, sums over rows. The tensor cores require both fp8 operands to be contiguous along
the inner dimension, so both g and x are transposed. An fp8 matmul only takes scales along its outer dimensions, and row
scales are now along the inner one. So one operand absorbs the row scales of both, and its columns get new scales. All
are powers of two: only exponents change, and nothing is rounded except values too small next to their column's amax.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pantheraml.kernels.dispatch import runs_triton
from pantheraml.kernels.fp8.e4m3 import E4M3
from pantheraml.kernels.fp8.transpose.reference import reference_fp8_transpose

DIVISOR = 16
"""Alignment of the inner dimension of an fp8 matmul."""


def fp8_transpose(qdata: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Transpose e4m3 `qdata` [rows, columns] to [columns, rows zero-padded to a multiple of 16].

    With `factors` [rows] (float32 powers of two) each row is multiplied by its factor, and scales [columns] are
    returned: float32 powers of two that map each column's amax into e4m3's range, or NaN if the column contains NaN.
    `qdata` may have any row stride; its columns must be a multiple of 16.
    """
    rows, columns = qdata.shape
    out = torch.empty(columns, -(-rows // DIVISOR) * DIVISOR, dtype=E4M3, device=qdata.device)
    if not runs_triton(qdata) or not rows:
        return out, reference_fp8_transpose(qdata, factors, out)
    from pantheraml.kernels.fp8.transpose import triton_kernel

    scales = None if factors is None else torch.empty(columns, dtype=torch.float32, device=qdata.device)
    triton_kernel.transpose(qdata if triton_kernel.is_aligned(qdata) else qdata.contiguous(), factors, out, scales)
    return out, scales
