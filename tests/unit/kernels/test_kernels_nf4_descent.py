"""NF4 coordinate descent converges to codes that no single change improves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pantheraml.kernels.fp8.e4m3 import to_e4m3
from pantheraml.kernels.nf4.descent import effective_weight, nf4_descent
from pantheraml.kernels.nf4.format import levels_on
from tests.nf4_tiles import Tiles, tiles


def values(codes: Tensor, scales: Tensor) -> Tensor:
    return effective_weight(levels_on(codes.device)[codes.int()] * scales)


def restart_from(case: Tiles, codes: Tensor) -> Tiles:
    """The same problem, starting from `codes`."""
    step = values(codes, case.scales) - values(case.codes, case.scales)
    return case._replace(codes=codes, slope=case.slope + step @ case.inputs + case.gradients @ step)


def test_effective_weight_is_the_mean_of_exact_and_e4m3_value() -> None:
    torch.manual_seed(0)
    plain = torch.randn(1000)
    rounded = to_e4m3(plain * 64).float() / 64
    torch.testing.assert_close(effective_weight(plain), (plain + rounded) / 2, atol=1e-4, rtol=0)


def test_each_pass_decreases_the_objective_until_converged() -> None:
    case = tiles(1)
    gains = []
    for _ in range(40):
        codes = nf4_descent(*case)
        step = values(codes, case.scales) - values(case.codes, case.scales)
        quadratic = (step @ case.inputs + case.gradients @ step) * step
        gains.append(-float((2 * step * case.slope + quadratic).sum()))
        case = restart_from(case, codes)
    assert gains[0] > 10 * gains[3] > 0
    assert min(gains) > -1e-3
    assert gains[-1] == 0
    # change of the objective when one weight moves by one level: 2 d slope + d**2 curvature
    for direction in (-1, 1):
        codes = (case.codes.int() + direction).clamp(0, 15)
        step = values(codes, case.scales) - values(case.codes, case.scales)
        increase = step * (2 * case.slope + step * case.curvature)
        assert float(increase.min()) > -0.02 * gains[0] / case.codes.numel()


def test_weights_with_zero_scale_do_not_change() -> None:
    case = tiles()
    assert torch.equal(nf4_descent(*case)[0, 3], case.codes[0, 3])


def test_mismatched_tiles_are_rejected() -> None:
    case = tiles()
    with pytest.raises(ValueError, match="same number of tiles"):
        nf4_descent(case.codes, *(part[:1] for part in case[1:]))
