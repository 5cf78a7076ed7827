"""Rounding by text on a GPU: the kernel moves weights where its reference does, and leaves what a CPU leaves."""

from __future__ import annotations

import torch

from pantheraml.kernels.nf4 import NF4Weight
from pantheraml.kernels.nf4_descent import descend, reference_descend
from pantheraml.models.quantise.rounding import round_nf4
from tests.nf4_tiles import changed, differing, problem, tiles

GPU = torch.device("cuda")


def test_it_moves_weights_where_the_reference_does() -> None:
    given = tiles(64)
    moved = descend(*(part.to(GPU) for part in given)).cpu()
    assert differing(moved, reference_descend(*given)) < 0.005


def test_what_is_left_is_what_a_cpu_leaves() -> None:
    given = problem(320, 200)
    found, expected = (
        round_nf4(*(part.to(device) for part in given)).dequantise(torch.float32).cpu() for device in (GPU, "cpu")
    )
    assert abs(changed(found, *given) / changed(expected, *given) - 1) < 0.01
    assert changed(found, *given) < 0.6 * changed(NF4Weight.pack(given[0]).dequantise(torch.float32), *given)
