from __future__ import annotations

import math

import torch

from pantheraml.engine.guard.policy import StepNumbers, first_nonfinite


def numbers(*losses: float, norm: float = 1.0) -> StepNumbers:
    return StepNumbers(loss_sums=list(losses), grad_norm=norm, target_tokens=10, stop_requested=False)


def test_the_loss_is_the_token_mean_over_all_ranks() -> None:
    assert numbers(1.5, 2.5).loss == 0.4


def test_the_first_bad_tensor_is_named() -> None:
    good, bad = torch.ones(2), torch.tensor([1.0, math.nan])
    assert first_nonfinite([("a", good), ("b", bad), ("c", bad)]) == "b"
    assert first_nonfinite([("a", good)]) is None
