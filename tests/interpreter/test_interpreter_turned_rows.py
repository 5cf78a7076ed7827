from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pantheraml.kernels.e4m3 import E4M3
from pantheraml.kernels.turned_rows import reference_turned_rows, triton_kernel, turned_rows

NAN = 0x7F


def any_rows(rows: int, columns: int) -> Tensor:
    """Every code but NaN's, with a row and a column of noughts."""
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    codes[codes & NAN == NAN] = 0
    codes[rows // 2], codes[:, columns // 2] = 0, 0
    return codes.view(E4M3)


def powers(rows: int, low: int = -30, high: int = 10) -> Tensor:
    return torch.exp2(torch.randint(low, high, (rows,)).float())


def assert_turned(payload: Tensor, factors: Tensor | None) -> None:
    """To the last bit; behind the rows are noughts."""
    rows, columns = payload.shape
    found, scales = turned_rows(payload, factors)
    assert found.shape == (columns, -(-rows // 16) * 16)
    assert found.is_contiguous()
    assert not found.view(torch.uint8)[:, rows:].any()
    wanted = torch.empty_like(found)
    wanted_scales = reference_turned_rows(payload, factors, wanted)
    if factors is None:
        assert scales is None
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
        return
    assert scales is not None
    assert wanted_scales is not None
    torch.testing.assert_close(scales, wanted_scales, rtol=0, atol=0, equal_nan=True)
    real, theirs = (turned.float() * scales[:, None] for turned in (found, wanted))
    torch.testing.assert_close(real[:, :rows], theirs[:, :rows], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 16, 37, 128, 130, 301])
@pytest.mark.parametrize("columns", [16, 48, 272])
def test_rows(rows: int, columns: int, scaled: bool) -> None:
    assert_turned(any_rows(rows, columns), powers(rows) if scaled else None)


@pytest.mark.parametrize("scaled", [False, True])
def test_rows_further_apart_than_they_are_long_or_askew(scaled: bool) -> None:
    wide = any_rows(130, 400)
    for payload in (wide[:, :272], wide[10:90, 16:272], wide[:, 3:51], any_rows(130, 50)[:, :48], any_rows(48, 130).T):
        rows = payload[:, : payload.shape[1] // 16 * 16]
        assert_turned(rows, powers(rows.shape[0]) if scaled else None)


def test_many_shares_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "_MOST_PROGRAMS", 3)
    assert_turned(any_rows(301, 48), powers(301))


def test_factors_at_both_ends() -> None:
    payload = any_rows(37, 48)
    factors = powers(37, -100, -90)
    assert_turned(payload, factors)
    factors[37 // 2] = 2.0**115  # of the row of noughts
    assert_turned(payload, factors)
    factors[0] = 2.0**110
    assert_turned(payload, factors)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("code", [NAN, 0x80 + NAN])
def test_what_is_no_number_stays_in_its_column(code: int) -> None:
    payload, factors = any_rows(37, 48), powers(37)
    payload.view(torch.uint8)[5, 3] = code
    assert_turned(payload, None)
    assert_turned(payload, factors)
    scales = turned_rows(payload, factors)[1]
    assert scales is not None
    assert scales.isnan().nonzero().tolist() == [[3]]
    factors[9] = torch.inf
    scales = turned_rows(payload, factors)[1]
    assert scales is not None
    assert not scales.isfinite().any()


def test_a_small_error_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "ceil_div", lambda a, b: max(1, a // b))  # forgets the tiles at the edges
    for factors in (None, powers(301)):
        with pytest.raises(AssertionError):
            assert_turned(any_rows(301, 272), factors)
