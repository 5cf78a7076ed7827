"""RMS normalisation that ends where the next product begins: the rows leave in e4m3, with room for adapter columns.

The residual sum before it and the residual gradient after it ride along, so neither takes a pass of its own; nor do the
rows of the gradient as the product before the sum wants them.

The gradient is formed from what was normalised or from the e4m3 rows that came of it, which the product keeps anyway:
divided by the weight they are the normalised rows again. So nothing else is kept (8 KB a token and norm in
Llama-3.1-8B's shape).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pantheraml.kernels.dispatch import runs_triton
from pantheraml.kernels.e4m3 import E4M3
from pantheraml.kernels.quantise_rows.reference import reference_quantise_rows
from pantheraml.kernels.rms_norm.reference import (
    reference_rms_norm,
    reference_rms_norm_backward,
    reference_rms_norm_backward_quantised,
    reference_rms_norm_weight_gradient,
)


class Normed(NamedTuple):
    payload: Tensor
    """[rows, columns + room]; the room is not written."""
    scales: Tensor | None
    """Of e4m3 rows."""
    inverse: Tensor
    """Inverse root mean square of each row, for the backward pass."""
    total: Tensor
    """What was normalised: x, or x + delta."""


def rms_norm(
    x: Tensor,
    weight: Tensor,
    epsilon: float,
    *,
    delta: Tensor | None = None,
    room: int = 0,
    plus_one: bool = False,
    quantise: bool = True,
) -> Normed:
    """Rows of x (+ delta), normalised and times `weight` (or 1 + weight), as e4m3 or in x's dtype."""
    rows, columns = x.shape
    out = torch.empty(rows, columns + room, dtype=E4M3 if quantise else x.dtype, device=x.device)
    if not runs_triton(x):
        total = x if delta is None else x + delta
        normal, inverse = reference_rms_norm(total, weight, epsilon, plus_one=plus_one)
        scales = None
        if quantise:
            out[:, :columns], scales = reference_quantise_rows(normal)
        else:
            out[:, :columns] = normal
        return Normed(out, scales, inverse, total)
    from pantheraml.kernels.rms_norm import triton_kernel

    x = x.contiguous()
    summed = None if delta is None else torch.empty_like(x)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device) if quantise else None
    inverse = torch.empty(rows, dtype=torch.float32, device=x.device)
    delta = None if delta is None else delta.contiguous()
    triton_kernel.forward(x, delta, summed, weight, out, scales, inverse, epsilon, plus_one)
    return Normed(out, scales, inverse, x if summed is None else summed)


class Quantised(NamedTuple):
    """A result of `rms_norm` in e4m3."""

    payload: Tensor
    """[rows, columns or more]; the others are not read."""
    scales: Tensor


def rms_norm_backward(
    g: Tensor,
    x: Tensor | Quantised,
    weight: Tensor,
    inverse: Tensor,
    *,
    plus_one: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """dx, in g's dtype, from the gradient of the normalised rows (+ `residual`, the gradient that x has besides).

    `x` is what was normalised, or what came of it. `weight` stays.
    """
    if not runs_triton(g):
        return _reference_backward(g, x, weight, inverse, plus_one, residual)
    from pantheraml.kernels.rms_norm import triton_kernel

    out = torch.empty_like(g, memory_format=torch.contiguous_format)
    residual = None if residual is None else residual.contiguous()
    triton_kernel.backward(g.contiguous(), *_rows(x), weight, inverse, residual, out, plus_one)
    return out


class Gradient(NamedTuple):
    dx: Tensor
    payload: Tensor
    """Its rows as input of a product, [rows, columns + room]; the room is not written."""
    scales: Tensor | None
    """Of e4m3 rows."""


def rms_norm_backward_rows(
    g: Tensor,
    x: Tensor | Quantised,
    weight: Tensor,
    inverse: Tensor,
    *,
    dtype: torch.dtype,
    plus_one: bool = False,
    residual: Tensor | None = None,
    room: int = 0,
    multiplier: Tensor | None = None,
) -> Gradient:
    """As `rms_norm_backward`, and the same rows in `dtype`: e4m3, and then times `multiplier`, if given, or another."""
    rows, columns = g.shape
    payload = torch.empty(rows, columns + room, dtype=dtype, device=g.device)
    quantise = dtype == E4M3
    if not runs_triton(g):
        dx = _reference_backward(g, x, weight, inverse, plus_one, residual)
        scales = None
        if quantise:
            payload[:, :columns], scales = reference_quantise_rows(dx, multiplier)
        else:
            payload[:, :columns] = dx
        return Gradient(dx, payload, scales)
    from pantheraml.kernels.rms_norm import triton_kernel

    dx = torch.empty_like(g, memory_format=torch.contiguous_format)
    scales = torch.empty(rows, dtype=torch.float32, device=g.device) if quantise else None
    residual = None if residual is None else residual.contiguous()
    triton_kernel.backward(
        g.contiguous(), *_rows(x), weight, inverse, residual, dx, plus_one,
        multiplier if quantise else None, payload, scales,
    )  # fmt: skip
    return Gradient(dx, payload, scales)


def rms_norm_weight_gradient(g: Tensor, x: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """[columns] in `dtype`, from the gradient of the normalised rows and from what was normalised. With `plus_one` it
    is the same."""
    if not runs_triton(g) or not len(g):
        return reference_rms_norm_weight_gradient(g, x, inverse, dtype)
    from pantheraml.kernels.rms_norm import triton_kernel

    out = torch.empty(g.shape[1], dtype=dtype, device=g.device)
    triton_kernel.weight_gradient(g.contiguous(), x.contiguous(), inverse, out)
    return out


def _rows(x: Tensor | Quantised) -> tuple[Tensor, Tensor | None]:
    return (x, None) if isinstance(x, Tensor) else x


def _reference_backward(
    g: Tensor, x: Tensor | Quantised, weight: Tensor, inverse: Tensor, plus_one: bool, residual: Tensor | None
) -> Tensor:
    if isinstance(x, Tensor):
        return reference_rms_norm_backward(g, x, weight, inverse, plus_one=plus_one, residual=residual)
    return reference_rms_norm_backward_quantised(g, *x, weight, inverse, plus_one=plus_one, residual=residual)
