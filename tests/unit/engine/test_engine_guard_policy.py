"""Verdicts of each policy on non-finite numbers and spikes, their bounds, and their state after a resume."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pantheraml.engine.guard.policy import MovingStatistics, Policy, StepNumbers, Verdict
from pantheraml.specs.train import StabilityConfig

BAD = math.nan


def numbers(*losses: float, norm: float = 1.0) -> StepNumbers:
    return StepNumbers(loss_sums=list(losses), grad_norm=norm, target_tokens=len(losses), stop_requested=False)


def policy(**settings: Any) -> Policy:
    return Policy(StabilityConfig.model_validate(settings))


def verdicts(given: Policy, losses: list[float]) -> list[Verdict]:
    return [given.decide(numbers(loss), loss_scale=None) for loss in losses]


def actions(given: Policy, losses: list[float]) -> list[str]:
    return [verdict.action for verdict in verdicts(given, losses)]


def noisy(count: int, level: float = 2.0) -> list[float]:
    draw = random.Random(0)
    return [level + draw.gauss(0, 0.1) for _ in range(count)]


@pytest.mark.parametrize(
    ("case", "way", "skipped", "scale", "action", "cause", "anomaly"),
    [
        (numbers(1.0, 2.0), "stop", 0, None, "step", "finite", None),
        (numbers(1.0, BAD), "stop", 0, None, "stop", "rank 1", "nonfinite"),
        (numbers(math.inf, 1.0), "skip", 0, None, "skip", "rank 0", "nonfinite"),
        (numbers(1.0, norm=BAD), "skip", 2, None, "skip", "gradient norm", "nonfinite"),
        (numbers(1.0, norm=BAD), "skip", 3, None, "stop", "3 skipped step(s) in a row", "nonfinite"),
        (numbers(1.0, norm=math.inf), "zero", 0, None, "zero", "gradient norm is inf", "nonfinite"),
        (numbers(1.0, norm=BAD), "zero", 3, None, "stop", "3 skipped", "nonfinite"),
        (numbers(1.0, norm=BAD), "detect", 9, None, "step", "gradient norm", "nonfinite"),
        (numbers(1.0, norm=BAD), "lower_rate", 0, None, "skip", "lowered to 0.5", "nonfinite"),
        (numbers(1.0, norm=BAD), "stop", 0, 65536.0, "retry", "fp16 overflow", "overflow"),
        (numbers(1.0, norm=BAD), "stop", 0, 1.0, "stop", "gradient norm", "nonfinite"),
        (numbers(BAD, norm=BAD), "stop", 0, 65536.0, "stop", "rank 0", "nonfinite"),
    ],
)
def test_verdict_on_nonfinite_numbers(
    case: StepNumbers, way: str, skipped: int, scale: float | None, action: str, cause: str, anomaly: str | None
) -> None:
    given = policy(on_nonfinite=way)
    given.bad_in_a_row = skipped
    verdict = given.decide(case, loss_scale=scale)
    assert (verdict.action, verdict.anomaly) == (action, anomaly)
    assert cause in verdict.cause


def test_skips_are_bounded_in_a_row_and_in_total() -> None:
    assert actions(policy(on_nonfinite="skip", max_skipped_steps=2), [BAD, BAD, 1.0, BAD, BAD, BAD]) == (
        ["skip", "skip", "step", "skip", "skip", "stop"]
    )
    bounded = policy(on_nonfinite="skip", max_skipped_steps=2, max_skipped_total=3)
    found = verdicts(bounded, [BAD, 1.0, BAD, 1.0, BAD, 1.0, BAD])
    assert [verdict.action for verdict in found] == ["skip", "step"] * 3 + ["stop"]
    assert "3 skipped step(s) in total" in found[-1].cause


def test_stop_verdict_does_not_count_after_resume() -> None:
    """The resumed run repeats the step, perhaps with another policy; the stop itself does not count."""
    given = policy(max_skipped_steps=1)
    verdicts(given, noisy(30))
    before = given.to_state()
    assert given.decide(numbers(BAD), loss_scale=None).action == "stop"
    assert given.to_state() == before


def test_rollbacks_are_bounded() -> None:
    given = policy(on_nonfinite="roll_back", max_rollbacks=2, max_skipped_steps=0)
    found = verdicts(given, [1.0, BAD, BAD, 1.0, BAD])
    assert [verdict.action for verdict in found] == ["step", "roll_back", "roll_back", "step", "stop"]
    assert "after 2 rollback(s)" in found[-1].cause


def test_look_does_not_change_state() -> None:
    given = policy(on_nonfinite="lower_rate")
    verdicts(given, noisy(30))
    before = given.to_state()
    assert given.look(numbers(BAD), loss_scale=None).rate_factor == 0.5
    assert given.to_state() == before


def test_overflow_does_not_update_statistics() -> None:
    """The step is retried and judged then."""
    given = policy(on_nonfinite="skip")
    verdicts(given, noisy(30))
    before = given.to_state()
    assert given.decide(numbers(1.0, norm=math.inf), loss_scale=2.0).action == "retry"
    left_out = replace(numbers(1.0), left_out=(1,))
    assert given.decide(left_out, loss_scale=2.0).action == "retry", "a smaller scale may make the rank finite again"
    assert given.to_state() == before
    assert given.decide(left_out, loss_scale=1.0).anomaly == "left_out"


def test_lowered_learning_rate_persists() -> None:
    given = policy(on_nonfinite="lower_rate", rate_factor=0.1)
    assert actions(given, [1.0, BAD, 1.0, BAD, 1.0]) == ["step", "skip", "step", "skip", "step"]
    assert given.rate_factor == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("way", "action", "anomaly"),
    [
        ("ignore", "step", None),
        ("detect", "step", "spike"),
        ("skip", "skip", "spike"),
        ("lower_rate", "skip", "spike"),
        ("roll_back", "roll_back", "spike"),
        ("stop", "stop", "spike"),
    ],
)
def test_verdict_on_a_spike(way: str, action: str, anomaly: str | None) -> None:
    given = policy(on_spike=way)
    assert all(verdict.anomaly is None for verdict in verdicts(given, noisy(60)))
    verdict = given.decide(numbers(4.0), loss_scale=None)
    assert (verdict.action, verdict.anomaly) == (action, anomaly)
    assert given.rate_factor == (0.5 if way == "lower_rate" else 1.0)


def test_jump_needs_a_large_ratio_and_a_large_zscore() -> None:
    draw = random.Random(0)
    norms = [math.exp(draw.gauss(0, 0.7)) for _ in range(2000)]  # the norms scatter by more than a factor of 50
    given = policy()
    found = [given.decide(numbers(2.0, norm=norm), loss_scale=None).anomaly for norm in norms]
    assert found.count("jump") <= 4, "each would cost a second pass"
    assert given.decide(numbers(2.0, norm=100.0), loss_scale=None).anomaly == "jump"
    assert given.decide(numbers(2.0, norm=1.0), loss_scale=None).anomaly is None
    for _ in range(20):
        given.decide(numbers(2.0, norm=30.0), loss_scale=None)
    assert given.decide(numbers(2.0, norm=30.0), loss_scale=None).anomaly is None, "the statistics adapt to a new level"


def test_excluded_ranks_do_not_stop_a_step() -> None:
    verdict = policy().decide(replace(numbers(1.0, 0.0), left_out=(1,)), loss_scale=None)
    assert (verdict.action, verdict.anomaly) == ("step", "left_out")
    assert "rank 1" in verdict.cause


def test_falling_loss_and_first_steps_are_not_spikes() -> None:
    assert all(verdict.anomaly is None for verdict in verdicts(policy(), [9.0, 1.0, 8.0, 2.0] * 4))
    falling = [2.0 + 6 * math.exp(-step / 30) for step in range(200)]
    assert all(verdict.anomaly is None for verdict in verdicts(policy(), falling))


def test_rounding_of_a_constant_loss_is_not_a_spike() -> None:
    given = policy()
    assert all(verdict.anomaly is None for verdict in verdicts(given, [0.5] * 50 + [0.505] * 5))
    assert given.decide(numbers(0.6), loss_scale=None).anomaly == "spike"


def test_spike_does_not_mask_the_next_but_a_new_level_is_learned() -> None:
    given = policy()
    verdicts(given, noisy(60))
    assert [verdict.anomaly for verdict in verdicts(given, [50.0, 2.0, 50.0])] == ["spike", None, "spike"]
    assert verdicts(given, noisy(60, level=5.0))[-1].anomaly is None


def test_nonfinite_losses_are_excluded_from_the_statistics() -> None:
    given = policy(on_nonfinite="detect")
    verdicts(given, [*noisy(60), BAD, math.inf])
    assert given.decide(numbers(4.0), loss_scale=None).anomaly == "spike"


def test_resumed_policy_continues_exactly() -> None:
    settings = {"on_nonfinite": "lower_rate", "on_spike": "skip", "max_skipped_total": 4}
    losses = [*noisy(30), BAD, 9.0, *noisy(10), BAD, *noisy(5), 9.0, 2.0, BAD]
    straight = policy(**settings)
    expected = verdicts(straight, losses)
    for cut in (3, 31, 32, 43, len(losses)):
        before, after = policy(**settings), policy(**settings)
        verdicts(before, losses[:cut])
        after.from_state(json.loads(json.dumps(before.to_state())))
        assert verdicts(after, losses[cut:]) == expected[cut:]
        assert after.to_state() == straight.to_state()
    assert expected[-1].action == "stop"


def test_warmup_statistics_are_plain_mean_and_variance() -> None:
    values = [3.0, 1.0, 4.0, 1.0, 5.0]
    found = MovingStatistics(decay=0.9, warmup=5)
    for value in values[:4]:
        found.add(value)
    assert not found.ready
    assert found.score(1e9) == 0.0
    found.add(values[4])
    assert found.mean == pytest.approx(np.mean(values))
    assert found.std == pytest.approx(np.std(values))
    assert found.score(9.0) == pytest.approx((9.0 - np.mean(values)) / np.std(values))
    variance, mean = np.var(values), np.mean(values)
    found.add(10.0)
    assert found.mean == pytest.approx(0.9 * mean + 0.1 * 10)
    assert found.std**2 == pytest.approx(0.9 * variance + 0.9 * 0.1 * (10 - mean) ** 2)
