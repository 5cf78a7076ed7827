"""Power-of-two scales."""

from __future__ import annotations

import pytest
import torch

from pantheraml.kernels.fp8.e4m3 import E4M3_MAX, LIMIT, MIN_SCALE, pow2_scale, row_scale


@pytest.mark.parametrize("limit", [E4M3_MAX, LIMIT])
def test_scale_is_the_smallest_sufficient_power_of_two(limit: float) -> None:
    """Also for values at a boundary and one ulp away from it."""
    torch.manual_seed(0)
    powers = torch.exp2(torch.arange(-90, 119).float())
    above, below = (limit * powers).nextafter(torch.tensor(torch.inf)), (limit * powers).nextafter(torch.tensor(0.0))
    largest = torch.tensor([torch.finfo(torch.float32).max])
    magnitudes = torch.cat([limit * powers, above, below, powers, powers * (1 + torch.rand(209)), largest])
    scales = pow2_scale(magnitudes, limit)
    assert (torch.frexp(scales).mantissa == 0.5).all()
    assert (magnitudes.double() <= limit * scales.double()).all()
    assert (magnitudes.double() > limit * scales.double() / 2).all()


def test_scales_of_zero_tiny_and_nonfinite_values() -> None:
    actual = pow2_scale(torch.tensor([0.0, 1e-45, 1e-40, 1e-30, torch.inf, torch.nan]), LIMIT)
    assert actual[:4].tolist() == [MIN_SCALE] * 4
    assert actual[4] == torch.inf
    assert actual[5].isnan()


def test_row_scale_of_nonfinite_rows() -> None:
    values = torch.tensor([[1.0, -112.0], [0.0, 0.0], [torch.nan, 1.0], [113.0, -torch.inf]]).bfloat16()
    assert row_scale(values).nan_to_num(nan=-1).tolist() == [1.0, MIN_SCALE, -1.0, torch.finfo(torch.float32).max]
