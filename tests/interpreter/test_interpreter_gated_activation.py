from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from pantheraml.kernels import triton_support
from pantheraml.kernels.gated_activation import (
    gated_activation,
    gated_activation_backward,
    reference_gated,
    reference_gated_backward,
    triton_kernel,
)
from pantheraml.kernels.quantise_rows import reference_quantise_rows
from tests.interpreter.comparison import assert_close, assert_same_rows

ROWS, COLUMNS = 7, 200
BOTH = (False, True)

# The infinity is meant: it makes a sigmoid of 0, on a GPU too, only that nobody there speaks of it.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


@pytest.fixture(params=["whole", "pieces, ahead", "chunks"], autouse=True)
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole rows; rows in four pieces, the last of them not full, on the way forward, and whole rows with others on
    their way to shared memory on the way back; rows that are read in four pieces twice."""
    ahead = request.param == "pieces, ahead"
    monkeypatch.setattr(triton_kernel, "processors", lambda _: triton_support.Processors(1, 16384 if ahead else 4096))
    if request.param != "whole":
        monkeypatch.setattr(triton_kernel, "_CHUNK", 64)
    if request.param == "chunks":
        monkeypatch.setattr(triton_kernel, "_WHOLE", 128)


def pair() -> torch.Tensor:
    """Gates from where the activation is nought to where it is the identity."""
    return torch.randn(ROWS, 2 * COLUMNS) * torch.tensor([0.01, 0.1, 1, 1, 3, 10, 30])[:, None]


def check_forward(*, gelu: bool, quantise: bool, shift: float = 0.0) -> None:
    values = pair()
    found = gated_activation(values + shift, room=64, gelu=gelu, quantise=quantise)
    wanted = reference_gated(values, gelu=gelu)
    assert found.payload.shape == (ROWS, COLUMNS + 64)
    if quantise:
        assert found.scales is not None
        assert_same_rows(found.payload[:, :COLUMNS], found.scales, *reference_quantise_rows(wanted))
    else:
        assert_close(found.payload[:, :COLUMNS], wanted)


@pytest.mark.parametrize(("gelu", "quantise"), itertools.product(BOTH, BOTH))
def test_forward(gelu: bool, quantise: bool) -> None:
    check_forward(gelu=gelu, quantise=quantise)


def check_backward(*, gelu: bool, quantise: bool, scaled: bool = False, shift: float = 0.0) -> None:
    values, g = pair(), torch.randn(ROWS, COLUMNS)
    multiplier = torch.rand(2 * COLUMNS) if scaled else None
    rooms = (32, 64)
    found = gated_activation_backward(
        g, values + shift, multiplier=multiplier, rooms=rooms, gelu=gelu, quantise=quantise
    )
    wanted = reference_gated(values, gelu=gelu), reference_gated_backward(g, values, gelu=gelu)
    multipliers = (None, multiplier)
    for ours, theirs, room, factor in zip(found, wanted, rooms, multipliers, strict=True):
        width = theirs.shape[1]
        assert ours.payload.shape == (ROWS, width + room)
        if quantise:
            assert ours.scales is not None
            assert_same_rows(ours.payload[:, :width], ours.scales, *reference_quantise_rows(theirs, factor))
        else:
            assert_close(ours.payload[:, :width], theirs)


@pytest.mark.parametrize("gelu", BOTH)
@pytest.mark.parametrize(("quantise", "scaled"), [(True, True), (True, False), (False, False)])
def test_backward(gelu: bool, quantise: bool, scaled: bool) -> None:
    check_backward(gelu=gelu, quantise=quantise, scaled=scaled)


@pytest.mark.parametrize("gelu", BOTH)
def test_backward_over_its_own_inputs(gelu: bool) -> None:
    values, g = pair(), torch.randn(ROWS, COLUMNS)
    wanted = gated_activation_backward(g, values, gelu=gelu, quantise=False)
    found = gated_activation_backward(g, values, gelu=gelu, quantise=False, in_place=True)
    assert [each.payload.data_ptr() for each in found] == [g.data_ptr(), values.data_ptr()]
    assert all(torch.equal(ours.payload, theirs.payload) for ours, theirs in zip(found, wanted, strict=True))


@pytest.mark.parametrize("options", [{"quantise": True}, {"rooms": (0, 64)}, {"rooms": (32, 0)}])
def test_what_does_not_fit_is_not_written_over(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="without rooms"):
        gated_activation_backward(torch.randn(ROWS, COLUMNS), pair(), **{"quantise": False} | options, in_place=True)


def test_scales_begin_where_a_product_can_read_them() -> None:
    """Also of an odd number of rows: cuBLAS refuses scales that do not begin at a multiple of 16 bytes."""
    for rows in gated_activation_backward(torch.randn(ROWS, COLUMNS), pair()):
        assert rows.scales is not None
        assert rows.scales.data_ptr() % 16 == 0


@pytest.mark.parametrize(("gelu", "value"), itertools.product(BOTH, (torch.nan, torch.inf, -torch.inf)))
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_what_is_no_number_is_none_afterwards(gelu: bool, value: float) -> None:
    """In gate, in up and in the gradient; rows without it are as before."""
    values, g = pair(), torch.randn(ROWS, COLUMNS)
    values[1, 3], values[3, COLUMNS + 150], g[5, 70] = value, value, value
    plain = reference_gated(values, gelu=gelu), reference_gated_backward(g, values, gelu=gelu)
    hidden, gradient = gated_activation_backward(g, values, gelu=gelu)
    for found, wanted in zip((gated_activation(values, gelu=gelu), hidden, gradient), (plain[0], *plain), strict=True):
        assert found.scales is not None
        strange = ~wanted.isfinite().all(dim=1)
        assert strange.sum() == (2 if wanted is plain[0] else 3)
        real = found.payload.float() * found.scales[:, None]
        assert not real[strange].isfinite().any()
        normal = reference_quantise_rows(wanted[~strange])
        assert_same_rows(found.payload[~strange], found.scales[~strange], *normal)


@pytest.mark.parametrize(("gelu", "quantise"), itertools.product(BOTH, BOTH))
def test_a_small_error_would_show(gelu: bool, quantise: bool) -> None:
    for check in (check_forward, check_backward):
        torch.manual_seed(0)
        with pytest.raises(AssertionError):
            check(gelu=gelu, quantise=quantise, shift=1e-4)
