"""RMSNorm that writes the next matmul's operand directly: e4m3 rows with padding for adapter columns.

The residual addition before it and the residual gradient after it are fused, and so is the quantization of the gradient
rows for the backward matmul of the layer before the residual addition.

The gradient is computed from the norm's input, or from its e4m3 output, which the matmul saves anyway: divided by the
weight it is the normalized input again. So the input need not be saved (8 KB per token and norm in Llama-3.1-8B's
shape).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pantheraml.kernels.dispatch import runs_triton
from pantheraml.kernels.fp8.e4m3 import E4M3
from pantheraml.kernels.fp8.quantize_rows.reference import reference_quantize_rows
from pantheraml.kernels.rms_norm.reference import (
    reference_rms_norm,
    reference_rms_norm_backward,
    reference_rms_norm_backward_quantized,
    reference_rms_norm_weight_gradient,
)


class Normed(NamedTuple):
    qdata: Tensor
    """[rows, columns + pad_cols]; the padding is uninitialized."""
    scales: Tensor | None
    """Row scales of e4m3 output."""
    inverse: Tensor
    """Inverse RMS of each row, for the backward pass."""
    total: Tensor
    """Input of the norm: x, or x + delta."""


def rms_norm(
    x: Tensor,
    weight: Tensor,
    epsilon: float,
    *,
    delta: Tensor | None = None,
    pad_cols: int = 0,
    plus_one: bool = False,
    quantize: bool = True,
) -> Normed:
    """RMSNorm of x (+ delta) times `weight` (or 1 + weight), as e4m3 or in x's dtype."""
    rows, columns = x.shape
    out = torch.empty(rows, columns + pad_cols, dtype=E4M3 if quantize else x.dtype, device=x.device)
    if not runs_triton(x):
        total = x if delta is None else x + delta
        normal, inverse = reference_rms_norm(total, weight, epsilon, plus_one=plus_one)
        scales = None
        if quantize:
            out[:, :columns], scales = reference_quantize_rows(normal)
        else:
            out[:, :columns] = normal
        return Normed(out, scales, inverse, total)
    from pantheraml.kernels.rms_norm import triton_kernel

    x = x.contiguous()
    summed = None if delta is None else torch.empty_like(x)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device) if quantize else None
    inverse = torch.empty(rows, dtype=torch.float32, device=x.device)
    delta = None if delta is None else delta.contiguous()
    triton_kernel.forward(x, delta, summed, weight, out, scales, inverse, epsilon, plus_one)
    return Normed(out, scales, inverse, x if summed is None else summed)


class QuantizedRows(NamedTuple):
    """e4m3 output of `rms_norm`."""

    qdata: Tensor
    """[rows, columns or more]; extra columns are not read."""
    scales: Tensor


def rms_norm_backward(
    g: Tensor,
    x: Tensor | QuantizedRows,
    weight: Tensor,
    inverse: Tensor,
    *,
    plus_one: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """Input gradient dx in g's dtype, from the output gradient `g` (+ `residual`, the residual branch's gradient).

    `x` is the norm's input or its e4m3 output. `weight` is treated as frozen.
    """
    if not runs_triton(g):
        return _reference_backward(g, x, weight, inverse, plus_one, residual)
    from pantheraml.kernels.rms_norm import triton_kernel

    out = torch.empty_like(g, memory_format=torch.contiguous_format)
    residual = None if residual is None else residual.contiguous()
    triton_kernel.backward(g.contiguous(), *_rows(x), weight, inverse, residual, out, plus_one)
    return out


class NormGradient(NamedTuple):
    dx: Tensor
    qdata: Tensor
    """dx as a matmul operand, [rows, columns + pad_cols]; the padding is uninitialized."""
    scales: Tensor | None
    """Row scales of e4m3 rows."""


def rms_norm_backward_rows(
    g: Tensor,
    x: Tensor | QuantizedRows,
    weight: Tensor,
    inverse: Tensor,
    *,
    dtype: torch.dtype,
    plus_one: bool = False,
    residual: Tensor | None = None,
    pad_cols: int = 0,
    multiplier: Tensor | None = None,
) -> NormGradient:
    """`rms_norm_backward`, plus dx as a matmul operand in `dtype`; e4m3 rows are first multiplied by `multiplier`."""
    rows, columns = g.shape
    qdata = torch.empty(rows, columns + pad_cols, dtype=dtype, device=g.device)
    quantize = dtype == E4M3
    if not runs_triton(g):
        dx = _reference_backward(g, x, weight, inverse, plus_one, residual)
        scales = None
        if quantize:
            qdata[:, :columns], scales = reference_quantize_rows(dx, multiplier)
        else:
            qdata[:, :columns] = dx
        return NormGradient(dx, qdata, scales)
    from pantheraml.kernels.rms_norm import triton_kernel

    dx = torch.empty_like(g, memory_format=torch.contiguous_format)
    scales = torch.empty(rows, dtype=torch.float32, device=g.device) if quantize else None
    residual = None if residual is None else residual.contiguous()
    triton_kernel.backward(
        g.contiguous(), *_rows(x), weight, inverse, residual, dx, plus_one,
        multiplier if quantize else None, qdata, scales,
    )  # fmt: skip
    return NormGradient(dx, qdata, scales)


def rms_norm_weight_gradient(g: Tensor, x: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """Weight gradient [columns] in `dtype` from the output gradient `g` and the norm's input `x`; `plus_one` does not
    change it."""
    if not runs_triton(g) or not len(g):
        return reference_rms_norm_weight_gradient(g, x, inverse, dtype)
    from pantheraml.kernels.rms_norm import triton_kernel

    out = torch.empty(g.shape[1], dtype=dtype, device=g.device)
    triton_kernel.weight_gradient(g.contiguous(), x.contiguous(), inverse, out)
    return out


def _rows(x: Tensor | QuantizedRows) -> tuple[Tensor, Tensor | None]:
    return (x, None) if isinstance(x, Tensor) else x


def _reference_backward(
    g: Tensor, x: Tensor | QuantizedRows, weight: Tensor, inverse: Tensor, plus_one: bool, residual: Tensor | None
) -> Tensor:
    if isinstance(x, Tensor):
        return reference_rms_norm_backward(g, x, weight, inverse, plus_one=plus_one, residual=residual)
    return reference_rms_norm_backward_quantized(g, *x, weight, inverse, plus_one=plus_one, residual=residual)
