from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from pantheraml.kernels.e4m3 import E4M3
from pantheraml.kernels.quantise_rows import reference_quantise_rows
from pantheraml.kernels.rms_norm import (
    Quantised,
    reference_rms_norm,
    reference_rms_norm_backward,
    reference_rms_norm_backward_quantised,
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


def check_forward(*, delta: bool, plus_one: bool, quantise: bool, epsilon: float = 1e-5) -> None:
    x, other, weight = torch.randn(ROWS, COLUMNS), torch.randn(ROWS, COLUMNS), torch.rand(COLUMNS)
    found = rms_norm(x, weight, epsilon, delta=other if delta else None, room=64, plus_one=plus_one, quantise=quantise)
    total = x + other if delta else x
    wanted, inverse = reference_rms_norm(total, weight, 1e-5, plus_one=plus_one)
    assert torch.equal(found.total, total)
    torch.testing.assert_close(found.inverse, inverse, rtol=1e-6, atol=0)
    assert found.payload.shape == (ROWS, COLUMNS + 64)
    payload = found.payload[:, :COLUMNS]
    if quantise:
        assert found.scales is not None
        assert_same_rows(payload, found.scales, *reference_quantise_rows(wanted))
    else:
        assert found.scales is None
        assert_close(payload, wanted)


@pytest.mark.parametrize(("delta", "plus_one", "quantise"), itertools.product(BOTH, BOTH, BOTH))
def test_forward(delta: bool, plus_one: bool, quantise: bool) -> None:
    check_forward(delta=delta, plus_one=plus_one, quantise=quantise)


def inputs(*, plus_one: bool, quantised: bool) -> dict[str, Any]:
    """Of a backward pass, and behind the columns of a quantised result what nobody may read."""
    x, weight = torch.randn(ROWS, COLUMNS), torch.rand(COLUMNS)
    if not quantised:
        return {"x": x, "weight": weight, "inverse": reference_rms_norm(x, weight, 1e-5)[1]}
    normed = rms_norm(x, weight, 1e-5, room=64, plus_one=plus_one)
    assert normed.scales is not None
    normed.payload[:, COLUMNS:] = torch.nan
    return {"x": Quantised(normed.payload, normed.scales), "weight": weight, "inverse": normed.inverse}


def reference(g: torch.Tensor, x: Any, weight: torch.Tensor, inverse: torch.Tensor, **options: Any) -> torch.Tensor:
    if isinstance(x, Quantised):
        return reference_rms_norm_backward_quantised(g, *x, weight, inverse, **options)
    return reference_rms_norm_backward(g, x, weight, inverse, **options)


def check_backward(*, plus_one: bool, residual: bool, quantised: bool, **changes: Any) -> None:
    g, other = torch.randn(2, ROWS, COLUMNS)
    given = inputs(plus_one=plus_one, quantised=quantised)
    extra = other if residual else None
    found = rms_norm_backward(g, **{**given, **changes}, plus_one=plus_one, residual=extra)
    assert_close(found, reference(g, **given, plus_one=plus_one, residual=extra))


@pytest.mark.parametrize(("plus_one", "residual", "quantised"), itertools.product(BOTH, BOTH, BOTH))
def test_backward(plus_one: bool, residual: bool, quantised: bool) -> None:
    check_backward(plus_one=plus_one, residual=residual, quantised=quantised)


def check_backward_rows(
    *, plus_one: bool, residual: bool, quantised: bool, dtype: torch.dtype, scaled: bool, error: float = 0.0
) -> None:
    g, other = torch.randn(2, ROWS, COLUMNS)
    multiplier = torch.rand(COLUMNS)
    given = inputs(plus_one=plus_one, quantised=quantised)
    extra = other if residual else None
    found = rms_norm_backward_rows(
        g, **given, dtype=dtype, plus_one=plus_one, residual=extra, room=64,
        multiplier=multiplier + error if scaled else None,
    )  # fmt: skip
    dx = reference(g, **given, plus_one=plus_one, residual=extra)
    assert_close(found.dx, dx)
    assert (found.payload.shape, found.payload.dtype) == ((ROWS, COLUMNS + 64), dtype)
    payload = found.payload[:, :COLUMNS]
    if dtype == E4M3:
        assert found.scales is not None
        assert_same_rows(payload, found.scales, *reference_quantise_rows(dx, multiplier if scaled else None))
    else:
        assert found.scales is None
        assert torch.equal(payload, found.dx.to(dtype))


@pytest.mark.parametrize(("plus_one", "residual", "quantised"), itertools.product(BOTH, BOTH, BOTH))
@pytest.mark.parametrize(
    ("dtype", "scaled"), [(E4M3, False), (E4M3, True), (torch.float32, False), (torch.float16, False)]
)
def test_backward_with_rows_for_a_product(
    plus_one: bool, residual: bool, quantised: bool, dtype: torch.dtype, scaled: bool
) -> None:
    check_backward_rows(plus_one=plus_one, residual=residual, quantised=quantised, dtype=dtype, scaled=scaled)


@pytest.mark.parametrize("plus_one", BOTH)
def test_weights_next_to_nought(plus_one: bool) -> None:
    """From one down to nought, over all sizes at which e4m3 holds of their rows less and less, and nothing."""
    weight = torch.exp2(-torch.linspace(0, 40, COLUMNS))
    weight[::7] *= -1
    weight[[50, 199]] = 0.0
    weight[100] = 1e-40
    if plus_one:
        weight -= 1
    x, g = torch.randn(2, ROWS, COLUMNS)
    normed = rms_norm(x, weight, 1e-5, plus_one=plus_one)
    assert normed.scales is not None
    given = {"x": Quantised(normed.payload, normed.scales), "weight": weight, "inverse": normed.inverse}
    found = rms_norm_backward(g, **given, plus_one=plus_one)
    assert_close(found, reference(g, **given, plus_one=plus_one))


@pytest.mark.parametrize("quantised", BOTH)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_what_is_no_number_is_none_afterwards(value: float, quantised: bool) -> None:
    g = torch.randn(ROWS, COLUMNS)
    g[4, 100] = value
    found = rms_norm_backward_rows(g, **inputs(plus_one=False, quantised=quantised), dtype=E4M3)
    assert found.scales is not None
    real = found.payload.float() * found.scales[:, None]
    assert not real[4].isfinite().any()
    assert real[torch.arange(ROWS) != 4].isfinite().all()


def test_the_backward_reference_is_what_autograd_finds() -> None:
    for plus_one in BOTH:
        x, weight, g = torch.randn(ROWS, COLUMNS, requires_grad=True), torch.rand(COLUMNS), torch.randn(ROWS, COLUMNS)
        out, inverse = reference_rms_norm(x, weight, 1e-5, plus_one=plus_one)
        (wanted,) = torch.autograd.grad(out, x, g)
        found = reference_rms_norm_backward(g, x.detach(), weight, inverse.detach(), plus_one=plus_one)
        assert_close(found, wanted)


def test_a_small_error_would_show() -> None:
    for quantise in BOTH:
        with pytest.raises(AssertionError):
            check_forward(delta=True, plus_one=False, quantise=quantise, epsilon=2e-5)
    for quantised in BOTH:
        with pytest.raises(AssertionError):
            check_backward(plus_one=False, residual=True, quantised=quantised, inverse=torch.ones(ROWS))
        with pytest.raises(AssertionError):
            check_backward_rows(plus_one=False, residual=True, quantised=quantised, dtype=E4M3, scaled=True, error=1e-4)


def check_weight_gradient(rows: int, columns: int) -> None:
    x, g, inverse = torch.randn(rows, columns), torch.randn(rows, columns), torch.rand(rows)
    found = rms_norm_weight_gradient(g, x, inverse, torch.float32)
    terms = g.double() * x.double() * inverse.double()[:, None]
    assert ((found - terms.sum(0)).abs() <= 1e-6 * terms.abs().sum(0)).all()
    assert torch.equal(found, rms_norm_weight_gradient(g, x, inverse, torch.float32))


@pytest.mark.parametrize("programs", [1056, 6], ids=["many shares", "few shares"])
@pytest.mark.parametrize("rows", [1, 37, 130])
@pytest.mark.parametrize("columns", [16, 48, 272])
def test_the_gradient_of_the_weight(rows: int, columns: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "_SUM_PROGRAMS", programs)
    check_weight_gradient(rows, columns)


def test_the_gradient_of_the_weight_in_bf16() -> None:
    x, g, inverse = torch.randn(70, 48).bfloat16(), torch.randn(70, 48).bfloat16(), torch.rand(70)
    found = rms_norm_weight_gradient(g, x, inverse, torch.bfloat16)
    assert found.dtype == torch.bfloat16
    wanted = reference_rms_norm_weight_gradient(g, x, inverse, torch.float32)
    torch.testing.assert_close(found.float(), wanted, rtol=2**-7, atol=1e-5)  # the interpreter cuts bf16 off
    g[3, 5] = torch.nan
    assert rms_norm_weight_gradient(g, x, inverse, torch.bfloat16).isnan().nonzero().tolist() == [[5]]


def test_a_row_left_out_of_the_gradient_of_the_weight_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "ceil_div", lambda a, b: max(1, a // b))
    with pytest.raises(AssertionError):
        check_weight_gradient(130, 48)
