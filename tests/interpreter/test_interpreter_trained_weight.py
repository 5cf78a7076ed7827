from __future__ import annotations

import pytest
import torch
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.e4m3 import E4M3, SMALLEST_SCALE
from pantheraml.kernels.trained_weight import (
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


def normal(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows of magnitudes that differ a thousandfold."""
    return (torch.randn(rows, columns) * 10 ** (-3 * torch.rand(rows, 1))).to(dtype)


def assert_scales(weights: list[Tensor], count: int = 5) -> None:
    found = weight_scales(weights, count)
    assert torch.equal(found, reference_weight_scale(weights).repeat(count))


def assert_written(weight: Tensor, scale: Tensor, *, transposed: bool, align: int = 16) -> None:
    """In the midst of a larger matrix, the rest of which stays as it was."""
    rows, columns = weight.shape
    height, width = (columns, rows) if transposed else (rows, columns)
    matrix = torch.full((height + 32, width + 2 * align), UNTOUCHED).byte()
    inner = matrix[16:-16, align:-align]
    place = (inner.T if transposed else inner).view(E4M3)
    weight_to_e4m3(weight, scale, place)
    wanted = torch.empty(weight.shape, dtype=E4M3)
    reference_weight_to_e4m3(weight, scale[0], wanted)
    torch.testing.assert_close(place.float(), wanted.float(), rtol=0, atol=0, equal_nan=True)
    inner.fill_(UNTOUCHED)
    assert (matrix == UNTOUCHED).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_scales(shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the largest is: in the first weight or the last, in a corner or next to one."""
    first, last = 1e-3 * normal(*shape, dtype), 1e-3 * normal(48, 64, dtype)
    wide = 1e-3 * normal(shape[0], shape[1] + 48, dtype)[:, 16:-32]
    for programs in (12, 2):
        monkeypatch.setattr(triton_kernel, "_MOST_PROGRAMS", programs)
        for weight, row, column in ((first, 0, 0), (first, -1, -1), (wide, -1, 0), (last, 17, 33)):
            before = weight[row, column].clone()
            weight[row, column] = -3.0
            assert_scales([first, wide, last])
            weight[row, column] = before
    assert_scales([first], 3000)


def test_scales_of_noughts_and_of_what_is_no_number() -> None:
    weight = torch.zeros(48, 64)
    assert weight_scales([weight], 2).tolist() == [SMALLEST_SCALE] * 2
    weight[40, 3] = -torch.inf
    assert weight_scales([weight, torch.ones(16, 16)], 2).tolist() == [torch.inf] * 2
    weight[3, 5] = torch.nan
    assert weight_scales([weight, torch.ones(16, 16)], 2).isnan().all()


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_weights(shape: tuple[int, int], dtype: torch.dtype, transposed: bool) -> None:
    weight = normal(*shape, dtype)
    assert_written(weight, weight_scales([weight], 3), transposed=transposed)
    assert_written(weight, torch.tensor([2.0**-12]), transposed=transposed)  # some are too large and become the largest


@BOTH
def test_rows_further_apart_than_they_are_long_or_askew(transposed: bool) -> None:
    wide, scale = normal(130, 400), torch.tensor([2.0**-6])
    for weight in (wide[:128, :272], wide[10:90, 16:272], wide[:, :271], normal(48, 64).T):
        assert_written(weight, scale, transposed=transposed)
    assert_written(normal(48, 64), scale, transposed=transposed, align=3)


@BOTH
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_what_is_no_number(transposed: bool) -> None:
    weight = normal(48, 64)
    weight[5, 3] = torch.nan
    assert_written(weight, torch.tensor([2.0**-6]), transposed=transposed)
    assert_written(weight, weight_scales([weight], 1), transposed=transposed)


@BOTH
def test_a_small_error_would_show(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(48, 272)
    weight[0, 0] = 448 * 2.0**-6  # at the end of the range
    monkeypatch.setattr(triton_kernel, "LARGEST", tl.constexpr(447.99))
    with pytest.raises(AssertionError):
        assert_scales([weight])
    monkeypatch.setattr(triton_kernel, "ceil_div", lambda a, b: max(1, a // b))  # forgets the tiles at the edges
    with pytest.raises(AssertionError):
        assert_written(normal(144, 784), torch.tensor([2.0**-6]), transposed=transposed)
