"""Coordinate descent over tiles of nf4: the kernel moves every weight to where its reference moves it."""

from __future__ import annotations

import pytest
import torch

from pantheraml.kernels.nf4_descent import descend, reference_descend, triton_kernel
from tests.nf4_tiles import differing, tiles


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
