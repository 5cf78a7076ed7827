"""NF4 coordinate descent: the kernel chooses the same codes as its reference."""

from __future__ import annotations

import pytest
import torch

from pantheraml.kernels.nf4.descent import nf4_descent, reference_nf4_descent, triton_kernel
from tests.nf4_tiles import differing, tiles


@pytest.mark.parametrize("count", [1, 3])
def test_codes_match_reference(count: int) -> None:
    case = tiles(count)
    moved, expected = nf4_descent(*case), reference_nf4_descent(*case)
    assert differing(expected, case.codes) > 0.5
    # a different summation order may decide between two equally good codes
    assert differing(moved, expected) < 0.005
    assert moved.dtype == torch.uint8


def test_weights_with_zero_scale_do_not_change() -> None:
    case = tiles()
    assert torch.equal(nf4_descent(*case)[0, 3], case.codes[0, 3])


@pytest.mark.parametrize("name", ["levels_on", "midpoints_on"])
def test_small_error_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = tiles()
    wrong = getattr(triton_kernel, name)(case.codes.device).clone()
    wrong[9] += 0.03
    monkeypatch.setattr(triton_kernel, name, lambda _: wrong)
    assert differing(nf4_descent(*case), reference_nf4_descent(*case)) > 0.005


@pytest.mark.parametrize("part", ["inputs", "gradients"])
def test_both_moments_affect_the_result(part: str) -> None:
    case = tiles()
    perturbed = case._replace(**{part: 0.8 * getattr(case, part)})
    assert differing(nf4_descent(*perturbed), reference_nf4_descent(*case)) > 0.005
