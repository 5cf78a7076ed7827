"""Scales that are powers of two."""

from __future__ import annotations

import pytest
import torch

from pantheraml.kernels.e4m3 import LARGEST, LIMIT, SMALLEST_SCALE, power_scale, row_scale


@pytest.mark.parametrize("limit", [LARGEST, LIMIT])
def test_the_smallest_power_of_two_that_suffices(limit: float) -> None:
    """Also of magnitudes that lie on a border, and next to one."""
    torch.manual_seed(0)
    powers = torch.exp2(torch.arange(-90, 119).float())
    above, below = (limit * powers).nextafter(torch.tensor(torch.inf)), (limit * powers).nextafter(torch.tensor(0.0))
    largest = torch.tensor([torch.finfo(torch.float32).max])
    magnitudes = torch.cat([limit * powers, above, below, powers, powers * (1 + torch.rand(209)), largest])
    scales = power_scale(magnitudes, limit)
    assert (torch.frexp(scales).mantissa == 0.5).all()
    assert (magnitudes.double() <= limit * scales.double()).all()
    assert (magnitudes.double() > limit * scales.double() / 2).all()


def test_what_has_no_such_power() -> None:
    found = power_scale(torch.tensor([0.0, 1e-45, 1e-40, 1e-30, torch.inf, torch.nan]), LIMIT)
    assert found[:4].tolist() == [SMALLEST_SCALE] * 4
    assert found[4] == torch.inf
    assert found[5].isnan()


def test_rows_with_and_without_numbers() -> None:
    values = torch.tensor([[1.0, -112.0], [0.0, 0.0], [torch.nan, 1.0], [113.0, -torch.inf]]).bfloat16()
    assert row_scale(values).nan_to_num(nan=-1).tolist() == [1.0, SMALLEST_SCALE, -1.0, torch.finfo(torch.float32).max]
