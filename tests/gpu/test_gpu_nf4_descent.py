"""Calibrated nf4 rounding on a GPU: the kernel moves the same weights as the reference, with the same error as on a
CPU.
"""

from __future__ import annotations

import torch

from pantheraml.kernels.nf4.descent import nf4_descent, reference_nf4_descent
from pantheraml.kernels.nf4.format import NF4Weight
from pantheraml.models.quantize.rounding import round_nf4
from tests.nf4_tiles import changed, differing, problem, tiles

GPU = torch.device("cuda")


def test_it_moves_weights_where_the_reference_does() -> None:
    arguments = tiles(64)
    moved = nf4_descent(*(part.to(GPU) for part in arguments)).cpu()
    assert differing(moved, reference_nf4_descent(*arguments)) < 0.005


def test_residual_error_matches_the_cpu() -> None:
    arguments = problem(320, 200)
    actual, expected = (
        round_nf4(*(part.to(device) for part in arguments)).dequantize(torch.float32).cpu() for device in (GPU, "cpu")
    )
    assert abs(changed(actual, *arguments) / changed(expected, *arguments) - 1) < 0.01
    assert changed(actual, *arguments) < 0.6 * changed(
        NF4Weight.quantize(arguments[0]).dequantize(torch.float32), *arguments
    )
