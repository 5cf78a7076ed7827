"""Matmul operands from plain rows: e4m3 or unquantized, with padding columns for LoRA adapters."""

from __future__ import annotations

import torch
from torch import Tensor

from pantheraml.kernels.dispatch import runs_triton
from pantheraml.kernels.fp8.e4m3 import E4M3
from pantheraml.kernels.fp8.quantize_rows.reference import reference_quantize_rows


def quantize_rows(x: Tensor, *, pad_cols: int = 0, multiplier: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize `x` [rows, columns] (times `multiplier` [columns]) to e4m3 [rows, columns + pad_cols] with float32
    scales [rows].

    The padding is left uninitialized.
    """
    rows, columns = x.shape
    out = torch.empty(rows, columns + pad_cols, dtype=E4M3, device=x.device)
    if not runs_triton(x):
        out[:, :columns], scales = reference_quantize_rows(x, multiplier)
        return out, scales
    from pantheraml.kernels.fp8.quantize_rows import triton_kernel

    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    triton_kernel.quantize(x if x.stride(1) == 1 else x.contiguous(), multiplier, out, scales)
    return out, scales


def copy_rows(x: Tensor, *, pad_cols: int, dtype: torch.dtype) -> Tensor:
    """Copy `x` [rows, columns] to [rows, columns + pad_cols] in `dtype`; the padding is left uninitialized.

    Torch copies to strided rows value by value: 100 us on average for 8,192 rows of 4,096 in bf16 (H200), against
    35 us for contiguous rows.
    """
    rows, columns = x.shape
    out = torch.empty(rows, columns + pad_cols, dtype=dtype, device=x.device)
    if not runs_triton(x):
        out[:, :columns] = x
        return out
    from pantheraml.kernels.fp8.quantize_rows import triton_kernel

    triton_kernel.copy(x if x.stride(1) == 1 else x.contiguous(), out)
    return out
