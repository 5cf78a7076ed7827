from __future__ import annotations

import math

import pytest
import torch

from pantheraml.engine.guard.verdict import StepNumbers, decide, first_nonfinite
from pantheraml.specs.train import StabilityConfig


def numbers(*losses: float, norm: float = 1.0) -> StepNumbers:
    return StepNumbers(loss_sums=list(losses), grad_norm=norm, target_tokens=10, stop_requested=False)


@pytest.mark.parametrize(
    ("case", "policy", "skipped", "scale", "action", "cause"),
    [
        (numbers(1.0, 2.0), "stop", 0, None, "step", "finite"),
        (numbers(1.0, math.nan), "stop", 0, None, "stop", "rank 1"),
        (numbers(math.inf, 1.0), "skip", 0, None, "skip", "rank 0"),
        (numbers(1.0, norm=math.nan), "skip", 2, None, "skip", "gradient norm"),
        (numbers(1.0, norm=math.nan), "skip", 3, None, "stop", "3 skipped"),
        (numbers(1.0, norm=math.nan), "stop", 0, 65536.0, "skip", "fp16 overflow"),
        (numbers(1.0, norm=math.nan), "stop", 0, 1.0, "stop", "gradient norm"),
        (numbers(math.nan, norm=math.nan), "stop", 0, 65536.0, "stop", "rank 0"),
    ],
)
def test_verdicts(case: StepNumbers, policy: str, skipped: int, scale: float | None, action: str, cause: str) -> None:
    config = StabilityConfig.model_validate({"on_nonfinite": policy})
    verdict = decide(case, config, skipped_in_a_row=skipped, loss_scale=scale)
    assert verdict.action == action
    assert cause in verdict.cause


def test_the_loss_is_the_token_mean_over_all_ranks() -> None:
    assert numbers(1.5, 2.5).loss == 0.4


def test_the_first_bad_tensor_is_named() -> None:
    good, bad = torch.ones(2), torch.tensor([1.0, math.nan])
    assert first_nonfinite([("a", good), ("b", bad), ("c", bad)]) == "b"
    assert first_nonfinite([("a", good)]) is None
