"""Rounding to nf4 by what text makes of a layer: its products change less, and the format is bitsandbytes'."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pantheraml.kernels.nf4 import NF4Weight
from pantheraml.models.quantise.nf4 import NF4Linear
from pantheraml.models.quantise.rounding import round_nf4
from pantheraml.models.quantise.stored import StoredFormat, nf4_parts, read_stored
from tests.nf4_tiles import changed, problem

SHAPES = [(128, 128), (100, 200), (200, 100), (8, 64), (48, 36)]
"""Square, wide, high; less than a tile; and blocks that begin in one row and end in another."""


def nearest(weight: Tensor) -> Tensor:
    return NF4Weight.pack(weight).dequantise(torch.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_products_change_less(shape: tuple[int, int]) -> None:
    weight, inputs, gradients = problem(*shape)
    rounded = round_nf4(weight, inputs, gradients).dequantise(torch.float32)
    assert changed(rounded, weight, inputs, gradients) < 0.6 * changed(nearest(weight), weight, inputs, gradients)


@pytest.mark.parametrize("side", [0, 1], ids=["outputs", "gradients"])
def test_both_products_change_less(side: int) -> None:
    weight, *moments = problem(128, 192)
    rounded = round_nf4(weight, *moments).dequantise(torch.float32)

    def on_one_side(values: Tensor) -> float:
        change = values - weight
        product = change @ moments[0] * change if side == 0 else moments[1] @ change * change
        return float(product.sum())

    assert on_one_side(rounded) < 0.75 * on_one_side(nearest(weight))


def test_without_text_weights_go_to_what_is_near() -> None:
    weight, inputs, gradients = problem(64, 128)
    rounded = round_nf4(weight, torch.zeros_like(inputs), torch.zeros_like(gradients)).dequantise(torch.float32)
    assert float((rounded - weight).norm()) < 1.02 * float((nearest(weight) - weight).norm())


def test_a_weight_of_nought_stays_so() -> None:
    _, inputs, gradients = problem(64, 128)
    rounded = round_nf4(torch.zeros(64, 128), inputs, gradients).dequantise(torch.float32)
    assert not rounded.any()


@pytest.mark.parametrize("shape", [(100, 200), (7, 9)])
def test_what_is_stored_is_read_to_the_last_bit(shape: tuple[int, int]) -> None:
    rounded = round_nf4(*problem(*shape))
    parts = nf4_parts(rounded, torch.bfloat16)
    read = read_stored(StoredFormat("nf4"), parts, torch.Size(shape), where="here")
    assert isinstance(read, NF4Weight)
    found, expected = (NF4Linear(weight, None).dequantise() for weight in (read, rounded))
    assert torch.equal(found, expected)


def test_magnitudes_of_another_form_cannot_be_stored() -> None:
    with pytest.raises(ValueError, match="another form"):
        nf4_parts(NF4Weight.pack(torch.randn(8, 64)), torch.bfloat16)
