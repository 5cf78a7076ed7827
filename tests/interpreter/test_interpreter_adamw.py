from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from pantheraml.kernels.adamw import Moments8bit, adamw8bit_, adamw_, reference_adamw8bit_, reference_adamw_
from tests.unit.kernels.adamw_inputs import gradients, step, weights

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(("dtype", "moments"), itertools.product(DTYPES, DTYPES))
def test_kernel_matches_reference(dtype: torch.dtype, moments: torch.dtype) -> None:
    size = 2500  # two programs and part of a third
    states = [[weights(size, dtype), torch.zeros(size, dtype=moments), torch.zeros(size, dtype=moments)] for _ in "ab"]
    for count, gradient in enumerate(gradients(3, size, dtype), start=1):
        for run, (p, m, v) in zip((adamw_, reference_adamw_), states, strict=True):
            run(p, gradient, m, v, step(count))
    assert_same(*states)


@pytest.mark.parametrize("dtype", DTYPES)
def test_8bit_kernel_matches_reference(dtype: torch.dtype) -> None:
    size = 2500
    parameters, moments = [weights(size, dtype) for _ in "ab"], [Moments8bit.zeros(torch.zeros(size)) for _ in "ab"]
    for count, gradient in enumerate(gradients(3, size, dtype), start=1):
        adamw8bit_(parameters[0], gradient, moments[0], step(count))
        reference_adamw8bit_(parameters[1], gradient, moments[1], step(count))
    assert_same([parameters[0], *moments[0]], [parameters[1], *moments[1]])


@pytest.mark.parametrize("change", [{"beta2": 0.9990001}, {"key": 5}, {"weight_decay": 0.1001}, {"beta1": 0.90001}])
def test_small_error_is_detected(change: dict[str, float]) -> None:
    size = 2500
    states = [[weights(size, torch.bfloat16), torch.zeros(size, dtype=torch.bfloat16), torch.zeros(size)] for _ in "ab"]
    (gradient,) = gradients(1, size, torch.bfloat16)
    adamw_(*_ordered(states[0], gradient), step(1))
    reference_adamw_(*_ordered(states[1], gradient), step(1, **change))
    with pytest.raises(AssertionError):
        assert_same(*states)


def _ordered(state: list[Tensor], gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return state[0], gradient, state[1], state[2]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Compare bf16 and codes bitwise, float32 within an ulp or two (multiply-adds may be fused or not)."""
    for actual, expected in zip(ours, theirs, strict=True):
        exact = actual.dtype != torch.float32
        torch.testing.assert_close(actual, expected, rtol=0 if exact else 2e-7, atol=0 if exact else 2e-9)
