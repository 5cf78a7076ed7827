from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from pantheraml.kernels import triton_support
from pantheraml.kernels.fp8.quantize_rows import reference_quantize_rows
from pantheraml.kernels.gated_activation import (
    gated_activation,
    gated_activation_backward,
    reference_gated,
    reference_gated_backward,
    triton_kernel,
)
from tests.interpreter.comparison import assert_close, assert_same_rows

ROWS, COLUMNS = 7, 200
BOTH = (False, True)

# The overflow is intended: the sigmoid becomes 0, as on a GPU, which does not warn.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


@pytest.fixture(params=["whole", "prefetch", "chunks"], autouse=True)
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """whole: one block per row. prefetch: four blocks per row, the last one partial, and a backward pass that
    prefetches rows to shared memory. chunks: rows that are read twice in four chunks."""
    memory = 16384 if request.param == "prefetch" else 4096
    monkeypatch.setattr(triton_kernel, "sm_limits", lambda _: triton_support.SmLimits(1, memory))
    if request.param != "whole":
        monkeypatch.setattr(triton_kernel, "_CHUNK", 64)
    if request.param == "chunks":
        monkeypatch.setattr(triton_kernel, "_MAX_WHOLE_ROW", 128)


def pair() -> torch.Tensor:
    """Gates from where the activation is zero to where it is the identity."""
    return torch.randn(ROWS, 2 * COLUMNS) * torch.tensor([0.01, 0.1, 1, 1, 3, 10, 30])[:, None]


def check_forward(*, gelu: bool, quantize: bool, shift: float = 0.0) -> None:
    values = pair()
    actual = gated_activation(values + shift, pad_cols=64, gelu=gelu, quantize=quantize)
    expected = reference_gated(values, gelu=gelu)
    assert actual.qdata.shape == (ROWS, COLUMNS + 64)
    if quantize:
        assert actual.scales is not None
        assert_same_rows(actual.qdata[:, :COLUMNS], actual.scales, *reference_quantize_rows(expected))
    else:
        assert_close(actual.qdata[:, :COLUMNS], expected)


@pytest.mark.parametrize(("gelu", "quantize"), itertools.product(BOTH, BOTH))
def test_forward(gelu: bool, quantize: bool) -> None:
    check_forward(gelu=gelu, quantize=quantize)


def check_backward(*, gelu: bool, quantize: bool, scaled: bool = False, shift: float = 0.0) -> None:
    values, g = pair(), torch.randn(ROWS, COLUMNS)
    multiplier = torch.rand(2 * COLUMNS) if scaled else None
    paddings = (32, 64)
    actual = gated_activation_backward(
        g, values + shift, multiplier=multiplier, pad_cols=paddings, gelu=gelu, quantize=quantize
    )
    expected = reference_gated(values, gelu=gelu), reference_gated_backward(g, values, gelu=gelu)
    multipliers = (None, multiplier)
    for ours, theirs, padding, factor in zip(actual, expected, paddings, multipliers, strict=True):
        width = theirs.shape[1]
        assert ours.qdata.shape == (ROWS, width + padding)
        if quantize:
            assert ours.scales is not None
            assert_same_rows(ours.qdata[:, :width], ours.scales, *reference_quantize_rows(theirs, factor))
        else:
            assert_close(ours.qdata[:, :width], theirs)


@pytest.mark.parametrize("gelu", BOTH)
@pytest.mark.parametrize(("quantize", "scaled"), [(True, True), (True, False), (False, False)])
def test_backward(gelu: bool, quantize: bool, scaled: bool) -> None:
    check_backward(gelu=gelu, quantize=quantize, scaled=scaled)


@pytest.mark.parametrize("gelu", BOTH)
def test_backward_in_place(gelu: bool) -> None:
    values, g = pair(), torch.randn(ROWS, COLUMNS)
    expected = gated_activation_backward(g, values, gelu=gelu, quantize=False)
    actual = gated_activation_backward(g, values, gelu=gelu, quantize=False, in_place=True)
    assert [each.qdata.data_ptr() for each in actual] == [g.data_ptr(), values.data_ptr()]
    assert all(torch.equal(ours.qdata, theirs.qdata) for ours, theirs in zip(actual, expected, strict=True))


@pytest.mark.parametrize("options", [{"quantize": True}, {"pad_cols": (0, 64)}, {"pad_cols": (32, 0)}])
def test_in_place_rejects_unsupported_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="without padding"):
        gated_activation_backward(torch.randn(ROWS, COLUMNS), pair(), **{"quantize": False} | options, in_place=True)


def test_scales_are_16_byte_aligned() -> None:
    """Also for an odd number of rows: cuBLAS rejects scales that are not 16-byte aligned."""
    for rows in gated_activation_backward(torch.randn(ROWS, COLUMNS), pair()):
        assert rows.scales is not None
        assert rows.scales.data_ptr() % 16 == 0


@pytest.mark.parametrize(("gelu", "value"), itertools.product(BOTH, (torch.nan, torch.inf, -torch.inf)))
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_nonfinite_rows_stay_nonfinite(gelu: bool, value: float) -> None:
    """Non-finite values in gate, up and gradient; other rows are not affected."""
    values, g = pair(), torch.randn(ROWS, COLUMNS)
    values[1, 3], values[3, COLUMNS + 150], g[5, 70] = value, value, value
    reference = reference_gated(values, gelu=gelu), reference_gated_backward(g, values, gelu=gelu)
    hidden, gradient = gated_activation_backward(g, values, gelu=gelu)
    for actual, expected in zip(
        (gated_activation(values, gelu=gelu), hidden, gradient), (reference[0], *reference), strict=True
    ):
        assert actual.scales is not None
        nonfinite = ~expected.isfinite().all(dim=1)
        assert nonfinite.sum() == (2 if expected is reference[0] else 3)
        real = actual.qdata.float() * actual.scales[:, None]
        assert not real[nonfinite].isfinite().any()
        normal = reference_quantize_rows(expected[~nonfinite])
        assert_same_rows(actual.qdata[~nonfinite], actual.scales[~nonfinite], *normal)


@pytest.mark.parametrize(("gelu", "quantize"), itertools.product(BOTH, BOTH))
def test_small_error_is_detected(gelu: bool, quantize: bool) -> None:
    for check in (check_forward, check_backward):
        torch.manual_seed(0)
        with pytest.raises(AssertionError):
            check(gelu=gelu, quantize=quantize, shift=1e-4)
