"""e4m3 cast of trainable weights, on the torch references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pantheraml.kernels.fp8.e4m3 import E4M3, E4M3_MAX, MIN_SCALE
from pantheraml.kernels.fp8.weight_cast import weight_scales, weight_to_e4m3


def weights(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.nn.Parameter((scale * torch.randn(48, 64)).to(dtype)) for scale in (0.01, 0.3, 0.02)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scale_follows_the_largest_weight(dtype: torch.dtype) -> None:
    params = weights(dtype)
    scales = weight_scales(params, 7)
    assert scales.shape == (7,)
    assert scales.dtype == torch.float32
    assert not scales.requires_grad
    assert (scales == scales[0]).all()
    amax = max(float(weight.detach().abs().max()) for weight in params)
    assert E4M3_MAX / 2 < amax / float(scales[0]) <= E4M3_MAX


def test_scales_of_zero_and_nan_weights() -> None:
    assert weight_scales([torch.zeros(16, 16)], 1).tolist() == [MIN_SCALE]
    with_nan = torch.ones(16, 16)
    with_nan[3, 5] = torch.nan
    assert weight_scales([torch.ones(16, 16), with_nan], 2).isnan().all()


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
def test_values_are_within_half_a_step(transposed: bool) -> None:
    """Write into a slice of a matrix, the rest of which must not change."""
    weight = weights(torch.bfloat16)[1]
    scales = weight_scales([weight], 1)
    matrix = torch.ones((96, 80) if transposed else (80, 96)).to(E4M3)
    inner = matrix[16:-16, 16:-16]
    weight_to_e4m3(weight, scales, inner.T if transposed else inner)
    actual = (inner.T if transposed else inner).double() * scales.double()
    exact = weight.detach().double()
    smallest = 2.0**-9 * float(scales[0])
    assert ((actual - exact).abs() <= (exact.abs() / 16).clamp(min=smallest / 2)).all()
    inner.fill_(1.0)
    assert (matrix.float() == 1).all()


def test_outputs_of_another_shape_are_rejected() -> None:
    weight, scales = torch.ones(32, 16), torch.ones(1)
    for out in (torch.empty(16, 32, dtype=E4M3), torch.empty(64, 32, dtype=E4M3)[::2, ::2]):
        with pytest.raises(ValueError, match="cannot write"):
            weight_to_e4m3(weight, scales, out)
