"""RMSNorm gradient from its e4m3 output, on the torch references."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from pantheraml.kernels.fp8.e4m3 import E4M3
from pantheraml.kernels.rms_norm import (
    Normed,
    QuantizedRows,
    rms_norm,
    rms_norm_backward,
    rms_norm_backward_rows,
    rms_norm_weight_gradient,
)

ROWS, COLUMNS = 64, 512
BOTH = (False, True)


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def norm_of(x: Tensor, weight: Tensor, **options: Any) -> tuple[Normed, QuantizedRows]:
    normed = rms_norm(x, weight, 1e-5, pad_cols=64, **options)
    assert normed.scales is not None
    normed.qdata[:, x.shape[1] :] = torch.nan  # the padding must not be read
    return normed, QuantizedRows(normed.qdata, normed.scales)


def relative_errors(*, plus_one: bool, residual: bool, correlation: float, error: float = 1.0) -> tuple[float, float]:
    """Relative errors of dx, and of dx as a matmul operand, against dx from the norm's input.

    A gradient correlated with x makes the mean term significant.
    """
    torch.manual_seed(0)
    x, g, other = torch.randn(3, ROWS, COLUMNS)
    weight = 0.3 + 1.2 * torch.rand(COLUMNS) - int(plus_one)
    normed, quantized = norm_of(x, weight, plus_one=plus_one)
    quantized = QuantizedRows(quantized.qdata, error * quantized.scales)
    options: Any = {"plus_one": plus_one, "residual": other if residual else None}
    g += correlation * x
    expected = rms_norm_backward(g, x, weight, normed.inverse, **options)
    actual = rms_norm_backward(g, quantized, weight, normed.inverse, **options)
    rows = rms_norm_backward_rows(g, quantized, weight, normed.inverse, **options, dtype=E4M3, pad_cols=64)
    assert torch.equal(rows.dx, actual)
    assert rows.scales is not None
    operand = rows.qdata[:, :COLUMNS].float() * rows.scales[:, None]
    return relative_error(actual, expected), relative_error(operand, expected)


@pytest.mark.parametrize(("plus_one", "residual"), itertools.product(BOTH, BOTH))
def test_gradient_from_output_matches_gradient_from_input(plus_one: bool, residual: bool) -> None:
    """Measured: at most 0.2 %, and 2.4 % (close to e4m3's own error) if the gradient is correlated with x."""
    plain, rows = relative_errors(plus_one=plus_one, residual=residual, correlation=0.0)
    assert plain < 0.004
    assert rows < 0.03
    correlation = relative_errors(plus_one=plus_one, residual=residual, correlation=1.0)[0]
    assert correlation < 0.03
    assert relative_errors(plus_one=plus_one, residual=residual, correlation=1.0, error=1.05)[0] > 0.03


@pytest.mark.parametrize("plus_one", BOTH)
@pytest.mark.parametrize("rescale", [1, 2, 64], ids="scales times {}".format)
def test_weights_near_zero(plus_one: bool, rescale: int) -> None:
    """Weights from one down to zero, through the range where e4m3 output loses precision and underflows: the
    normalized input is off by at most 100 %. Also for rows that were rescaled."""
    torch.manual_seed(0)
    x, g = torch.randn(2, ROWS, COLUMNS)
    g += x
    gain = torch.exp2(-torch.linspace(0, 20, COLUMNS))
    gain[::7] *= -1
    gain[[50, 300]] = 0.0
    weight = gain - 1 if plus_one else gain
    gain = weight + 1 if plus_one else weight
    normed, quantized = norm_of(x, weight, plus_one=plus_one)
    smaller = (quantized.qdata.float() / rescale).to(E4M3)
    actual = rms_norm_backward(
        g, QuantizedRows(smaller, quantized.scales * rescale), weight, normed.inverse, plus_one=plus_one
    )
    expected = rms_norm_backward(g, x, weight, normed.inverse, plus_one=plus_one)
    normal = x * normed.inverse[:, None]
    term = normed.inverse[:, None] * normal * (g * gain * normal).mean(dim=1, keepdim=True)
    assert actual.isfinite().all()
    assert ((actual - expected).abs() <= 1.05 * term.abs() + 1e-7).all()
    large = gain.abs() > 0.1
    assert relative_error(actual[:, large], expected[:, large]) < 0.03


def test_zero_weight_does_not_affect_other_columns() -> None:
    torch.manual_seed(0)
    x, g = torch.randn(2, ROWS, COLUMNS)
    weight = 0.3 + 1.2 * torch.rand(COLUMNS)
    actual = []
    for tiny in (0.0, 1e-40, 1e-35, 1e-20):
        weight[7] = tiny
        normed, quantized = norm_of(x, weight)
        actual.append(rms_norm_backward(g, quantized, weight, normed.inverse))
        torch.testing.assert_close(actual[-1], actual[0], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("plus_one", BOTH)
def test_weight_gradient_matches_autograd(plus_one: bool) -> None:
    torch.manual_seed(0)
    x, g = torch.randn(2, ROWS, COLUMNS, dtype=torch.float64)
    weight = torch.rand(COLUMNS, dtype=torch.float64, requires_grad=True)
    inverse = torch.rsqrt(x.pow(2).mean(-1) + 1e-5)
    (x * inverse[:, None] * (weight + int(plus_one))).backward(g)
    assert weight.grad is not None
    actual = rms_norm_weight_gradient(g.float(), x.float(), inverse.float(), torch.float32)
    assert relative_error(actual.double(), weight.grad) < 1e-6
    rounded = rms_norm_weight_gradient(g.bfloat16(), x.bfloat16(), inverse.float(), torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    assert relative_error(rounded.double(), weight.grad) < 0.005
