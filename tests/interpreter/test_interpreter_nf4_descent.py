"""Coordinate descent over tiles of nf4: the kernel moves every weight to where its reference moves it."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from pantheraml.kernels.nf4 import levels_on
from pantheraml.kernels.nf4_descent import TILE, as_multiplied, descend, reference_descend, triton_kernel


class Tiles(NamedTuple):
    codes: Tensor
    slope: Tensor
    scales: Tensor
    curvature: Tensor
    inputs: Tensor
    gradients: Tensor


def tiles(count: int = 2) -> Tiles:
    """Weights that were rounded at random, some of them in blocks of nought, and moments far from diagonal."""
    torch.manual_seed(count)
    codes = torch.randint(0, 16, (count, TILE, TILE), dtype=torch.uint8)
    scales = (0.5 + torch.rand(count, TILE, 1)).expand(-1, -1, TILE).clone()
    scales[0, 3] = 0
    moments = []
    for _ in range(2):
        rows = torch.randn(count, 3 * TILE, TILE) @ (torch.eye(TILE) + 0.1 * torch.randn(TILE, TILE))
        moments.append(rows.mT @ rows / (3 * TILE))
    inputs, gradients = moments
    change = as_multiplied(levels_on(codes.device)[codes.int()] * scales) - torch.randn(count, TILE, TILE) / 2
    curvature = inputs.diagonal(dim1=1, dim2=2)[:, None, :] + gradients.diagonal(dim1=1, dim2=2)[:, :, None]
    return Tiles(codes, change @ inputs + gradients @ change, scales, curvature, inputs, gradients)


def differing(one: Tensor, other: Tensor) -> float:
    return float((one != other).float().mean())


@pytest.mark.parametrize("count", [1, 3])
def test_it_moves_weights_where_the_reference_does(count: int) -> None:
    given = tiles(count)
    moved, expected = descend(*given), reference_descend(*given)
    assert differing(expected, given.codes) > 0.5
    # sums in another order may decide between two values that are equally good
    assert differing(moved, expected) < 0.005
    assert moved.dtype == torch.uint8


def test_weights_of_nought_stay() -> None:
    given = tiles()
    assert torch.equal(descend(*given)[0, 3], given.codes[0, 3])


@pytest.mark.parametrize("name", ["levels_on", "midpoints_on"])
def test_a_small_error_would_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tiles()
    wrong = getattr(triton_kernel, name)(given.codes.device).clone()
    wrong[9] += 0.03
    monkeypatch.setattr(triton_kernel, name, lambda _: wrong)
    assert differing(descend(*given), reference_descend(*given)) > 0.005


@pytest.mark.parametrize("part", ["inputs", "gradients"])
def test_both_moments_count(part: str) -> None:
    given = tiles()
    less = given._replace(**{part: 0.8 * getattr(given, part)})
    assert differing(descend(*less), reference_descend(*given)) > 0.005


def test_tiles_of_another_size_are_refused() -> None:
    given = tiles()
    with pytest.raises(ValueError, match="as many of each"):
        descend(given.codes, *(part[:1] for part in given[1:]))
