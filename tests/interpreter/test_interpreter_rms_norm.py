from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from pantheraml.kernels.quantise_rows import reference_quantise_rows
from pantheraml.kernels.rms_norm import (
    reference_rms_norm,
    reference_rms_norm_backward,
    rms_norm,
    rms_norm_backward,
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


def check_backward(*, plus_one: bool, residual: bool, **changes: Any) -> None:
    g, x, other = torch.randn(3, ROWS, COLUMNS)
    weight = torch.rand(COLUMNS)
    _, inverse = reference_rms_norm(x, weight, 1e-5)
    extra = other if residual else None
    given = {"weight": weight, "inverse": inverse, **changes}
    found = rms_norm_backward(g, x, **given, plus_one=plus_one, residual=extra)
    assert_close(found, reference_rms_norm_backward(g, x, weight, inverse, plus_one=plus_one, residual=extra))


@pytest.mark.parametrize(("plus_one", "residual"), itertools.product(BOTH, BOTH))
def test_backward(plus_one: bool, residual: bool) -> None:
    check_backward(plus_one=plus_one, residual=residual)


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
    with pytest.raises(AssertionError):
        check_backward(plus_one=False, residual=True, inverse=torch.ones(ROWS))
