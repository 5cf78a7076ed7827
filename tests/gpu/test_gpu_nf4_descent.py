"""Rounding by text on a GPU: the kernel moves weights where its reference does, and a sum that is small on a CPU is."""

from __future__ import annotations

import torch
from torch import Tensor

from pantheraml.kernels.nf4 import NF4Weight
from pantheraml.kernels.nf4_descent import descend, reference_descend
from pantheraml.models.quantise.rounding import round_nf4
from tests.interpreter.test_interpreter_nf4_descent import differing, tiles

GPU = torch.device("cuda")


def test_it_moves_weights_where_the_reference_does() -> None:
    given = tiles(64)
    moved = descend(*(part.to(GPU) for part in given)).cpu()
    assert differing(moved, reference_descend(*given)) < 0.005


def problem(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, and moments of correlated inputs and gradients."""
    generator = torch.Generator().manual_seed(0)
    weight = 0.02 * torch.randn(rows, columns, generator=generator)
    moments = []
    for size in (columns, rows):
        mixed = torch.randn(size, size, generator=generator) * torch.linspace(1, 0.05, size)
        moments.append(mixed @ mixed.T)
    inputs, gradients = moments
    return weight.to(device), inputs.to(device), gradients.to(device)


def left(rounded: NF4Weight, weight: Tensor, inputs: Tensor, gradients: Tensor) -> float:
    change = rounded.dequantise(torch.float32) - weight
    forth = (change @ inputs * change).sum() / inputs.diagonal().mean()
    return float(forth + (gradients @ change * change).sum() / gradients.diagonal().mean())


def test_what_is_left_is_what_a_cpu_leaves() -> None:
    shape = (320, 200)
    here, there = (problem(*shape, device) for device in (GPU, torch.device("cpu")))
    found, expected = left(round_nf4(*here), *here), left(round_nf4(*there), *there)
    assert abs(found / expected - 1) < 0.01
    assert found < 0.6 * left(NF4Weight.pack(here[0]), *here)
