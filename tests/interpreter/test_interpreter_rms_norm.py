from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from pantheraml.kernels.fp8.e4m3 import E4M3
from pantheraml.kernels.fp8.quantize_rows import reference_quantize_rows
from pantheraml.kernels.rms_norm import (
    QuantizedRows,
    reference_rms_norm,
    reference_rms_norm_backward,
    reference_rms_norm_backward_quantized,
    reference_rms_norm_weight_gradient,
    rms_norm,
    rms_norm_backward,
    rms_norm_backward_rows,
    rms_norm_weight_gradient,
    triton_kernel,
)
from tests.interpreter.comparison import assert_close, assert_same_rows

ROWS, COLUMNS = 9, 200
BOTH = (False, True)


def check_forward(*, delta: bool, plus_one: bool, quantize: bool, epsilon: float = 1e-5) -> None:
    x, other, weight = torch.randn(ROWS, COLUMNS), torch.randn(ROWS, COLUMNS), torch.rand(COLUMNS)
    actual = rms_norm(
        x, weight, epsilon, delta=other if delta else None, pad_cols=64, plus_one=plus_one, quantize=quantize
    )
    total = x + other if delta else x
    expected, inverse = reference_rms_norm(total, weight, 1e-5, plus_one=plus_one)
    assert torch.equal(actual.total, total)
    torch.testing.assert_close(actual.inverse, inverse, rtol=1e-6, atol=0)
    assert actual.qdata.shape == (ROWS, COLUMNS + 64)
    qdata = actual.qdata[:, :COLUMNS]
    if quantize:
        assert actual.scales is not None
        assert_same_rows(qdata, actual.scales, *reference_quantize_rows(expected))
    else:
        assert actual.scales is None
        assert_close(qdata, expected)


@pytest.mark.parametrize(("delta", "plus_one", "quantize"), itertools.product(BOTH, BOTH, BOTH))
def test_forward(delta: bool, plus_one: bool, quantize: bool) -> None:
    check_forward(delta=delta, plus_one=plus_one, quantize=quantize)


def inputs(*, plus_one: bool, quantized: bool) -> dict[str, Any]:
    """Inputs of a backward pass; the padding of a quantized output is NaN, since it must not be read."""
    x, weight = torch.randn(ROWS, COLUMNS), torch.rand(COLUMNS)
    if not quantized:
        return {"x": x, "weight": weight, "inverse": reference_rms_norm(x, weight, 1e-5)[1]}
    normed = rms_norm(x, weight, 1e-5, pad_cols=64, plus_one=plus_one)
    assert normed.scales is not None
    normed.qdata[:, COLUMNS:] = torch.nan
    return {"x": QuantizedRows(normed.qdata, normed.scales), "weight": weight, "inverse": normed.inverse}


def reference(g: torch.Tensor, x: Any, weight: torch.Tensor, inverse: torch.Tensor, **options: Any) -> torch.Tensor:
    if isinstance(x, QuantizedRows):
        return reference_rms_norm_backward_quantized(g, *x, weight, inverse, **options)
    return reference_rms_norm_backward(g, x, weight, inverse, **options)


def check_backward(*, plus_one: bool, residual: bool, quantized: bool, **changes: Any) -> None:
    g, other = torch.randn(2, ROWS, COLUMNS)
    saved = inputs(plus_one=plus_one, quantized=quantized)
    extra = other if residual else None
    actual = rms_norm_backward(g, **{**saved, **changes}, plus_one=plus_one, residual=extra)
    assert_close(actual, reference(g, **saved, plus_one=plus_one, residual=extra))


@pytest.mark.parametrize(("plus_one", "residual", "quantized"), itertools.product(BOTH, BOTH, BOTH))
def test_backward(plus_one: bool, residual: bool, quantized: bool) -> None:
    check_backward(plus_one=plus_one, residual=residual, quantized=quantized)


def check_backward_rows(
    *, plus_one: bool, residual: bool, quantized: bool, dtype: torch.dtype, scaled: bool, error: float = 0.0
) -> None:
    g, other = torch.randn(2, ROWS, COLUMNS)
    multiplier = torch.rand(COLUMNS)
    saved = inputs(plus_one=plus_one, quantized=quantized)
    extra = other if residual else None
    actual = rms_norm_backward_rows(
        g, **saved, dtype=dtype, plus_one=plus_one, residual=extra, pad_cols=64,
        multiplier=multiplier + error if scaled else None,
    )  # fmt: skip
    dx = reference(g, **saved, plus_one=plus_one, residual=extra)
    assert_close(actual.dx, dx)
    assert (actual.qdata.shape, actual.qdata.dtype) == ((ROWS, COLUMNS + 64), dtype)
    qdata = actual.qdata[:, :COLUMNS]
    if dtype == E4M3:
        assert actual.scales is not None
        assert_same_rows(qdata, actual.scales, *reference_quantize_rows(dx, multiplier if scaled else None))
    else:
        assert actual.scales is None
        assert torch.equal(qdata, actual.dx.to(dtype))


@pytest.mark.parametrize(("plus_one", "residual", "quantized"), itertools.product(BOTH, BOTH, BOTH))
@pytest.mark.parametrize(
    ("dtype", "scaled"), [(E4M3, False), (E4M3, True), (torch.float32, False), (torch.float16, False)]
)
def test_backward_with_matmul_operand(
    plus_one: bool, residual: bool, quantized: bool, dtype: torch.dtype, scaled: bool
) -> None:
    check_backward_rows(plus_one=plus_one, residual=residual, quantized=quantized, dtype=dtype, scaled=scaled)


@pytest.mark.parametrize("plus_one", BOTH)
def test_weights_near_zero(plus_one: bool) -> None:
    """Weights from one down to zero, through the range where e4m3 output loses precision and underflows."""
    weight = torch.exp2(-torch.linspace(0, 40, COLUMNS))
    weight[::7] *= -1
    weight[[50, 199]] = 0.0
    weight[100] = 1e-40
    if plus_one:
        weight -= 1
    x, g = torch.randn(2, ROWS, COLUMNS)
    normed = rms_norm(x, weight, 1e-5, plus_one=plus_one)
    assert normed.scales is not None
    saved = {"x": QuantizedRows(normed.qdata, normed.scales), "weight": weight, "inverse": normed.inverse}
    actual = rms_norm_backward(g, **saved, plus_one=plus_one)
    assert_close(actual, reference(g, **saved, plus_one=plus_one))


@pytest.mark.parametrize("quantized", BOTH)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_nonfinite_rows_stay_nonfinite(value: float, quantized: bool) -> None:
    g = torch.randn(ROWS, COLUMNS)
    g[4, 100] = value
    actual = rms_norm_backward_rows(g, **inputs(plus_one=False, quantized=quantized), dtype=E4M3)
    assert actual.scales is not None
    real = actual.qdata.float() * actual.scales[:, None]
    assert not real[4].isfinite().any()
    assert real[torch.arange(ROWS) != 4].isfinite().all()


def test_backward_reference_matches_autograd() -> None:
    for plus_one in BOTH:
        x, weight, g = torch.randn(ROWS, COLUMNS, requires_grad=True), torch.rand(COLUMNS), torch.randn(ROWS, COLUMNS)
        out, inverse = reference_rms_norm(x, weight, 1e-5, plus_one=plus_one)
        (expected,) = torch.autograd.grad(out, x, g)
        actual = reference_rms_norm_backward(g, x.detach(), weight, inverse.detach(), plus_one=plus_one)
        assert_close(actual, expected)


def test_small_error_is_detected() -> None:
    for quantize in BOTH:
        with pytest.raises(AssertionError):
            check_forward(delta=True, plus_one=False, quantize=quantize, epsilon=2e-5)
    for quantized in BOTH:
        with pytest.raises(AssertionError):
            check_backward(plus_one=False, residual=True, quantized=quantized, inverse=torch.ones(ROWS))
        with pytest.raises(AssertionError):
            check_backward_rows(plus_one=False, residual=True, quantized=quantized, dtype=E4M3, scaled=True, error=1e-4)


def check_weight_gradient(rows: int, columns: int) -> None:
    x, g, inverse = torch.randn(rows, columns), torch.randn(rows, columns), torch.rand(rows)
    actual = rms_norm_weight_gradient(g, x, inverse, torch.float32)
    terms = g.double() * x.double() * inverse.double()[:, None]
    assert ((actual - terms.sum(0)).abs() <= 1e-6 * terms.abs().sum(0)).all()
    assert torch.equal(actual, rms_norm_weight_gradient(g, x, inverse, torch.float32))


@pytest.mark.parametrize("programs", [1056, 6], ids=["many partial sums", "few partial sums"])
@pytest.mark.parametrize("rows", [1, 37, 130])
@pytest.mark.parametrize("columns", [16, 48, 272])
def test_weight_gradient(rows: int, columns: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "_SUM_PROGRAMS", programs)
    check_weight_gradient(rows, columns)


def test_weight_gradient_in_bf16() -> None:
    x, g, inverse = torch.randn(70, 48).bfloat16(), torch.randn(70, 48).bfloat16(), torch.rand(70)
    actual = rms_norm_weight_gradient(g, x, inverse, torch.bfloat16)
    assert actual.dtype == torch.bfloat16
    expected = reference_rms_norm_weight_gradient(g, x, inverse, torch.float32)
    torch.testing.assert_close(actual.float(), expected, rtol=2**-7, atol=1e-5)  # the interpreter truncates to bf16
    g[3, 5] = torch.nan
    assert rms_norm_weight_gradient(g, x, inverse, torch.bfloat16).isnan().nonzero().tolist() == [[5]]


def test_missing_row_in_weight_gradient_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "ceil_div", lambda a, b: max(1, a // b))
    with pytest.raises(AssertionError):
        check_weight_gradient(130, 48)
