"""Calibrated nf4 rounding: smaller matmul errors, in bitsandbytes' format."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pantheraml.kernels.nf4.format import NF4Weight
from pantheraml.models.quantize.checkpoint_formats import (
    CheckpointFormat,
    nf4_checkpoint_tensors,
    read_quantized_weight,
)
from pantheraml.models.quantize.nf4 import NF4Linear
from pantheraml.models.quantize.rounding import round_nf4
from tests.nf4_tiles import changed, problem

SHAPES = [(128, 128), (100, 200), (200, 100), (8, 64), (48, 36)]
"""Square, wide, tall; smaller than a tile; and blocks that cross rows."""


def nearest(weight: Tensor) -> Tensor:
    return NF4Weight.quantize(weight).dequantize(torch.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_matmul_error_is_smaller_than_round_to_nearest(shape: tuple[int, int]) -> None:
    weight, inputs, gradients = problem(*shape)
    rounded = round_nf4(weight, inputs, gradients).dequantize(torch.float32)
    assert changed(rounded, weight, inputs, gradients) < 0.6 * changed(nearest(weight), weight, inputs, gradients)


@pytest.mark.parametrize("side", [0, 1], ids=["outputs", "gradients"])
def test_forward_and_backward_errors_are_both_smaller(side: int) -> None:
    weight, *moments = problem(128, 192)
    rounded = round_nf4(weight, *moments).dequantize(torch.float32)

    def on_one_side(values: Tensor) -> float:
        change = values - weight
        product = change @ moments[0] * change if side == 0 else moments[1] @ change * change
        return float(product.sum())

    assert on_one_side(rounded) < 0.75 * on_one_side(nearest(weight))


def test_without_calibration_data_weights_round_to_nearest() -> None:
    weight, inputs, gradients = problem(64, 128)
    rounded = round_nf4(weight, torch.zeros_like(inputs), torch.zeros_like(gradients)).dequantize(torch.float32)
    assert float((rounded - weight).norm()) < 1.02 * float((nearest(weight) - weight).norm())


def test_a_zero_weight_stays_zero() -> None:
    _, inputs, gradients = problem(64, 128)
    rounded = round_nf4(torch.zeros(64, 128), inputs, gradients).dequantize(torch.float32)
    assert not rounded.any()


@pytest.mark.parametrize("shape", [(100, 200), (7, 9)])
def test_saved_weights_are_read_back_exactly(shape: tuple[int, int]) -> None:
    rounded = round_nf4(*problem(*shape))
    parts = nf4_checkpoint_tensors(rounded, torch.bfloat16)
    read = read_quantized_weight(CheckpointFormat("nf4"), parts, torch.Size(shape), where="here")
    assert isinstance(read, NF4Weight)
    actual, expected = (NF4Linear(weight, None).dequantize() for weight in (read, rounded))
    assert torch.equal(actual, expected)


def test_scales_that_are_not_double_quantized_cannot_be_saved() -> None:
    with pytest.raises(ValueError, match="not double-quantized"):
        nf4_checkpoint_tensors(NF4Weight.quantize(torch.randn(8, 64)), torch.bfloat16)
