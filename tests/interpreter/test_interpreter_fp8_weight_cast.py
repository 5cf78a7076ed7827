from __future__ import annotations

import pytest
import torch
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.fp8.e4m3 import E4M3, MIN_SCALE
from pantheraml.kernels.fp8.weight_cast import (
    reference_weight_scale,
    reference_weight_to_e4m3,
    triton_kernel,
    weight_scales,
    weight_to_e4m3,
)

UNTOUCHED = 0x55
SHAPES = [(16, 16), (48, 272), (144, 528), (272, 1040)]
DTYPES = [torch.bfloat16, torch.float32]
BOTH = pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])


def random_weight(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows whose magnitudes differ by up to 1000x."""
    return (torch.randn(rows, columns) * 10 ** (-3 * torch.rand(rows, 1))).to(dtype)


def check_scales(weights: list[Tensor], count: int = 5) -> None:
    actual = weight_scales(weights, count)
    assert torch.equal(actual, reference_weight_scale(weights).repeat(count))


def check_write(weight: Tensor, scale: Tensor, *, transposed: bool, align: int = 16) -> None:
    """Write into a slice of a larger matrix, the rest of which must not change."""
    rows, columns = weight.shape
    height, width = (columns, rows) if transposed else (rows, columns)
    matrix = torch.full((height + 32, width + 2 * align), UNTOUCHED).byte()
    inner = matrix[16:-16, align:-align]
    out = (inner.T if transposed else inner).view(E4M3)
    weight_to_e4m3(weight, scale, out)
    expected = torch.empty(weight.shape, dtype=E4M3)
    reference_weight_to_e4m3(weight, scale[0], expected)
    torch.testing.assert_close(out.float(), expected.float(), rtol=0, atol=0, equal_nan=True)
    inner.fill_(UNTOUCHED)
    assert (matrix == UNTOUCHED).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_scales_match_reference(shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the amax in the first weight or the last, in a corner or inside."""
    first, last = 1e-3 * random_weight(*shape, dtype), 1e-3 * random_weight(48, 64, dtype)
    wide = 1e-3 * random_weight(shape[0], shape[1] + 48, dtype)[:, 16:-32]
    for programs in (12, 2):
        monkeypatch.setattr(triton_kernel, "_AMAX_PROGRAMS", programs)
        for weight, row, column in ((first, 0, 0), (first, -1, -1), (wide, -1, 0), (last, 17, 33)):
            before = weight[row, column].clone()
            weight[row, column] = -3.0
            check_scales([first, wide, last])
            weight[row, column] = before
    check_scales([first], 3000)


def test_scales_of_zero_and_nonfinite_weights() -> None:
    weight = torch.zeros(48, 64)
    assert weight_scales([weight], 2).tolist() == [MIN_SCALE] * 2
    weight[40, 3] = -torch.inf
    assert weight_scales([weight, torch.ones(16, 16)], 2).tolist() == [torch.inf] * 2
    weight[3, 5] = torch.nan
    assert weight_scales([weight, torch.ones(16, 16)], 2).isnan().all()


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_cast_matches_reference(shape: tuple[int, int], dtype: torch.dtype, transposed: bool) -> None:
    weight = random_weight(*shape, dtype)
    check_write(weight, weight_scales([weight], 3), transposed=transposed)
    check_write(weight, torch.tensor([2.0**-12]), transposed=transposed)  # some values saturate


@BOTH
def test_strided_and_unaligned_weights(transposed: bool) -> None:
    wide, scale = random_weight(130, 400), torch.tensor([2.0**-6])
    for weight in (wide[:128, :272], wide[10:90, 16:272], wide[:, :271], random_weight(48, 64).T):
        check_write(weight, scale, transposed=transposed)
    check_write(random_weight(48, 64), scale, transposed=transposed, align=3)


@BOTH
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_nan_weights(transposed: bool) -> None:
    weight = random_weight(48, 64)
    weight[5, 3] = torch.nan
    check_write(weight, torch.tensor([2.0**-6]), transposed=transposed)
    check_write(weight, weight_scales([weight], 1), transposed=transposed)


@BOTH
def test_small_error_is_detected(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(48, 272)
    weight[0, 0] = 448 * 2.0**-6  # exactly E4M3_MAX after scaling
    monkeypatch.setattr(triton_kernel, "E4M3_MAX", tl.constexpr(447.99))
    with pytest.raises(AssertionError):
        check_scales([weight])
    monkeypatch.setattr(triton_kernel, "ceil_div", lambda a, b: max(1, a // b))  # skips the tiles at the edges
    with pytest.raises(AssertionError):
        check_write(random_weight(144, 784), torch.tensor([2.0**-6]), transposed=transposed)
