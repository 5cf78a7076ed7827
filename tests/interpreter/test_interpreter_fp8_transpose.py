from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pantheraml.kernels.fp8.e4m3 import E4M3
from pantheraml.kernels.fp8.transpose import fp8_transpose, reference_fp8_transpose, triton_kernel

NAN = 0x7F


def random_codes(rows: int, columns: int) -> Tensor:
    """Every code except NaN, with a row and a column of zeros."""
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    codes[codes & NAN == NAN] = 0
    codes[rows // 2], codes[:, columns // 2] = 0, 0
    return codes.view(E4M3)


def powers(rows: int, low: int = -30, high: int = 10) -> Tensor:
    return torch.exp2(torch.randint(low, high, (rows,)).float())


def check_transpose(qdata: Tensor, factors: Tensor | None) -> None:
    """Compare bitwise with the reference; the padding must be zero."""
    rows, columns = qdata.shape
    actual, scales = fp8_transpose(qdata, factors)
    assert actual.shape == (columns, -(-rows // 16) * 16)
    assert actual.is_contiguous()
    assert not actual.view(torch.uint8)[:, rows:].any()
    expected = torch.empty_like(actual)
    expected_scales = reference_fp8_transpose(qdata, factors, expected)
    if factors is None:
        assert scales is None
        assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
        return
    assert scales is not None
    assert expected_scales is not None
    torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0, equal_nan=True)
    real, theirs = (transposed.float() * scales[:, None] for transposed in (actual, expected))
    torch.testing.assert_close(real[:, :rows], theirs[:, :rows], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 16, 37, 128, 130, 301])
@pytest.mark.parametrize("columns", [16, 48, 272])
def test_transpose_matches_reference(rows: int, columns: int, scaled: bool) -> None:
    check_transpose(random_codes(rows, columns), powers(rows) if scaled else None)


@pytest.mark.parametrize("scaled", [False, True])
def test_strided_and_unaligned_rows(scaled: bool) -> None:
    wide = random_codes(130, 400)
    for qdata in (
        wide[:, :272],
        wide[10:90, 16:272],
        wide[:, 3:51],
        random_codes(130, 50)[:, :48],
        random_codes(48, 130).T,
    ):
        rows = qdata[:, : qdata.shape[1] // 16 * 16]
        check_transpose(rows, powers(rows.shape[0]) if scaled else None)


def test_amax_split_over_many_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "_AMAX_PROGRAMS", 3)
    check_transpose(random_codes(301, 48), powers(301))


def test_extreme_factors() -> None:
    qdata = random_codes(37, 48)
    factors = powers(37, -100, -90)
    check_transpose(qdata, factors)
    factors[37 // 2] = 2.0**115  # factor of the zero row
    check_transpose(qdata, factors)
    factors[0] = 2.0**110
    check_transpose(qdata, factors)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("code", [NAN, 0x80 + NAN])
def test_nan_stays_in_its_column(code: int) -> None:
    qdata, factors = random_codes(37, 48), powers(37)
    qdata.view(torch.uint8)[5, 3] = code
    check_transpose(qdata, None)
    check_transpose(qdata, factors)
    scales = fp8_transpose(qdata, factors)[1]
    assert scales is not None
    assert scales.isnan().nonzero().tolist() == [[3]]
    factors[9] = torch.inf
    scales = fp8_transpose(qdata, factors)[1]
    assert scales is not None
    assert not scales.isfinite().any()


def test_small_error_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "ceil_div", lambda a, b: max(1, a // b))  # skips the tiles at the edges
    for factors in (None, powers(301)):
        with pytest.raises(AssertionError):
            check_transpose(random_codes(301, 272), factors)
