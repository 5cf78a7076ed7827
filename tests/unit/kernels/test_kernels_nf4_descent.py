"""Coordinate descent over tiles of nf4: it ends where no single weight can do better."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pantheraml.kernels.e4m3 import to_e4m3
from pantheraml.kernels.nf4 import levels_on
from pantheraml.kernels.nf4_descent import as_multiplied, descend
from tests.nf4_tiles import Tiles, tiles


def values(codes: Tensor, scales: Tensor) -> Tensor:
    return as_multiplied(levels_on(codes.device)[codes.int()] * scales)


def moved_to(given: Tiles, codes: Tensor) -> Tiles:
    """The same problem from there."""
    step = values(codes, given.scales) - values(given.codes, given.scales)
    return given._replace(codes=codes, slope=given.slope + step @ given.inputs + given.gradients @ step)


def test_a_value_as_multiplied_is_midway_between_itself_and_e4m3s() -> None:
    torch.manual_seed(0)
    plain = torch.randn(1000)
    rounded = to_e4m3(plain * 64).float() / 64
    torch.testing.assert_close(as_multiplied(plain), (plain + rounded) / 2, atol=1e-4, rtol=0)


def test_each_pass_makes_the_sum_smaller_until_no_weight_can() -> None:
    given = tiles(1)
    gains = []
    for _ in range(40):
        codes = descend(*given)
        step = values(codes, given.scales) - values(given.codes, given.scales)
        curved = (step @ given.inputs + given.gradients @ step) * step
        gains.append(-float((2 * step * given.slope + curved).sum()))
        given = moved_to(given, codes)
    assert gains[0] > 10 * gains[3] > 0
    assert min(gains) > -1e-3
    assert gains[-1] == 0
    # what moving one weight alone would bring: 2 d slope + d**2 curvature, up or down by one level
    for direction in (-1, 1):
        codes = (given.codes.int() + direction).clamp(0, 15)
        step = values(codes, given.scales) - values(given.codes, given.scales)
        worse = step * (2 * given.slope + step * given.curvature)
        assert float(worse.min()) > -0.02 * gains[0] / given.codes.numel()


def test_weights_of_nought_stay() -> None:
    given = tiles()
    assert torch.equal(descend(*given)[0, 3], given.codes[0, 3])


def test_tiles_of_another_size_are_refused() -> None:
    given = tiles()
    with pytest.raises(ValueError, match="as many of each"):
        descend(given.codes, *(part[:1] for part in given[1:]))
