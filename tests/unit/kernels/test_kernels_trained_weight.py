"""Weights in training as e4m3 matrices, on the torch references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pantheraml.kernels.e4m3 import E4M3, LARGEST, SMALLEST_SCALE
from pantheraml.kernels.trained_weight import weight_scales, weight_to_e4m3


def weights(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.nn.Parameter((scale * torch.randn(48, 64)).to(dtype)) for scale in (0.01, 0.3, 0.02)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_largest_of_all_decides(dtype: torch.dtype) -> None:
    given = weights(dtype)
    scales = weight_scales(given, 7)
    assert scales.shape == (7,)
    assert scales.dtype == torch.float32
    assert not scales.requires_grad
    assert (scales == scales[0]).all()
    most = max(float(weight.detach().abs().max()) for weight in given)
    assert LARGEST / 2 < most / float(scales[0]) <= LARGEST


def test_no_weights_but_noughts_and_what_is_no_number() -> None:
    assert weight_scales([torch.zeros(16, 16)], 1).tolist() == [SMALLEST_SCALE]
    broken = torch.ones(16, 16)
    broken[3, 5] = torch.nan
    assert weight_scales([torch.ones(16, 16), broken], 2).isnan().all()


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
def test_values_are_within_half_a_step(transposed: bool) -> None:
    """Into the midst of a matrix, and nothing beside it is touched."""
    weight = weights(torch.bfloat16)[1]
    scales = weight_scales([weight], 1)
    matrix = torch.ones((96, 80) if transposed else (80, 96)).to(E4M3)
    inner = matrix[16:-16, 16:-16]
    weight_to_e4m3(weight, scales, inner.T if transposed else inner)
    found = (inner.T if transposed else inner).double() * scales.double()
    exact = weight.detach().double()
    smallest = 2.0**-9 * float(scales[0])
    assert ((found - exact).abs() <= (exact.abs() / 16).clamp(min=smallest / 2)).all()
    inner.fill_(1.0)
    assert (matrix.float() == 1).all()


def test_places_of_another_shape_are_refused() -> None:
    weight, scales = torch.ones(32, 16), torch.ones(1)
    for out in (torch.empty(16, 32, dtype=E4M3), torch.empty(64, 32, dtype=E4M3)[::2, ::2]):
        with pytest.raises(ValueError, match="cannot write"):
            weight_to_e4m3(weight, scales, out)
