"""Detection of divergence during warmup and at the end of a run."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.errors import TrainingError
from pantheraml.engine.guard.policy import LossTrend, Policy, StepNumbers, Verdict
from pantheraml.specs.train import StabilityConfig, TrainConfig
from tests import toy
from tests.harness import make_plan, make_run, merged, train_here, values

VOCABULARY = 320
GUESS = math.log(VOCABULARY)


def run_policy(losses: list[float], **settings: Any) -> tuple[Policy, list[Verdict]]:
    policy = Policy(StabilityConfig.model_validate(settings), VOCABULARY)
    numbers = [StepNumbers([loss], grad_norm=1.0, target_tokens=1, stop_requested=False) for loss in losses]
    return policy, [policy.decide(each, loss_scale=None) for each in numbers]


def falling(first: float, last: float, steps: int, noise: float, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    way = [last + (first - last) * math.exp(-5 * step / steps) for step in range(steps)]
    return [max(0.01, loss * (1 + draw.gauss(0, noise))) for loss in way]


EXPLODED = [5.7, 23_327_193.0, 9_000.0, 40.0, *[GUESS + 0.01 * (step % 3) for step in range(40)]]

NORMAL = {
    # first loss, last loss, steps, noise
    "fine-tuning": (2.4, 1.9, 100, 0.1),
    "learning little": (2.4, 2.35, 100, 0.1),
    "from scratch": (GUESS, 3.0, 100, 0.02),
    "from above a guess": (3 * GUESS, 4.0, 100, 0.1),
    "few tokens a batch": (1.0, 0.6, 100, 0.5),
    "a short run": (2.4, 2.3, 5, 0.3),
    "short and from scratch": (GUESS, 5.5, 8, 0.01),
    "already converged": (0.03, 0.03, 40, 0.5),
}


@pytest.mark.parametrize("name", NORMAL)
def test_normal_runs_raise_no_concern(name: str) -> None:
    for seed in range(100):
        losses = falling(*NORMAL[name], seed=seed)
        policy, verdicts = run_policy(losses)
        warm_up = verdicts[: StabilityConfig().spike_warmup_steps]
        assert [verdict.cause for verdict in warm_up if verdict.anomaly] == []
        assert policy.trend.concern() is None


def test_rising_loss_in_warmup_is_no_spike() -> None:
    policy, verdicts = run_policy([5.7, 5.9, 6.4, 7.0, 6.0, 5.0, *[4.0] * 20])
    assert not any(verdict.anomaly for verdict in verdicts)
    assert policy.trend.concern() is None


def test_divergence_during_warmup_is_a_spike() -> None:
    policy, verdicts = run_policy(EXPLODED)
    assert [(step, verdict.anomaly) for step, verdict in enumerate(verdicts) if verdict.anomaly] == [(1, "spike")]
    assert "2.333e+07 is far above that of the first step (5.7) and of a uniform guess (5.768)" in verdicts[1].cause
    concern = policy.trend.concern()
    assert concern is not None
    assert "that of a uniform guess among 320 tokens (5.768), and began at 5.7;" in concern
    _, verdicts = run_policy(EXPLODED[:2], on_spike="stop")
    assert verdicts[-1].action == "stop"
    _, verdicts = run_policy([5.7, *[1e4] * 4], on_spike="skip")
    assert [verdict.action for verdict in verdicts] == ["step", "skip", "skip", "skip", "stop"]
    _, verdicts = run_policy(EXPLODED, on_spike="ignore")
    assert not any(verdict.anomaly for verdict in verdicts)


def test_early_divergence_does_not_mask_later_spikes() -> None:
    draw = random.Random(0)
    losses = [5.7, 2e7, *[5.0 + draw.gauss(0, 0.05) for _ in range(60)], 14.0]
    _, verdicts = run_policy(losses)
    assert verdicts[-1].anomaly == "spike"


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        (EXPLODED, "uniform guess"),
        ([5.7, 2e7, 5e6, 1e4, 5.77], "uniform guess"),  # short, but diverged
        ([5.75] * 30, "uniform guess"),  # no progress
        ([2.4] * 5 + [4.0] * 30, "ended at 4, above the initial 2.4"),
        ([2.4, 2.5, 30.0, 40.0], "ended at 40, above the initial 2.5"),
        ([2.4, 30.0, *[2.0] * 30], None),  # recovered
        ([2.4], None),
        ([], None),
    ],
)
def test_final_concern(losses: list[float], words: str | None) -> None:
    policy, _ = run_policy(losses)
    found = policy.trend.concern()
    assert found is None if words is None else words in (found or ""), found


@pytest.mark.parametrize(("losses", "advice"), [(EXPLODED, "a lower train"), ([5.75] * 30, "a higher train")])
def test_advice_fits_the_cause(losses: list[float], advice: str) -> None:
    policy, _ = run_policy(losses)
    assert advice in (policy.trend.concern() or "")


def test_without_vocabulary_only_the_first_loss_counts() -> None:
    trend = LossTrend()
    for loss in [*[2.4] * 5, *[4.0] * 30]:
        trend.add(loss, taken=True)
    assert trend.bound == math.inf
    assert "above the initial 2.4" in (trend.concern() or "")


@pytest.mark.parametrize("cut", [1, 2, 5, 30])
def test_resumed_trend_gives_the_same_concern(cut: int) -> None:
    whole, expected = run_policy(EXPLODED)
    before, verdicts = run_policy(EXPLODED[:cut])
    policy = Policy(StabilityConfig(), VOCABULARY)
    policy.from_state(json.loads(json.dumps(before.to_state())))
    for loss in EXPLODED[cut:]:
        verdicts.append(policy.decide(StepNumbers([loss], 1.0, 1, stop_requested=False), loss_scale=None))
    assert verdicts == expected
    assert policy.trend.concern() == whole.trend.concern()
    older = Policy(StabilityConfig(), VOCABULARY)
    older.from_state({name: value for name, value in before.to_state().items() if name != "trend"})
    assert older.trend.concern() is None


# Whole runs -----------------------------------------------------------------------------------------------------------


def run_at(root: Path, name: str, rate: float, **changes: Any) -> list[dict[str, Any]]:
    toy.write_jsonl(root / "data.jsonl", toy.arithmetic(100))
    toy.write_llama(root / "model", initializer_range=0.3)
    base = {
        "model": {"path": str(root / "model")},
        "data": {"path": str(root / "data.jsonl"), "seq_len": 48, "cache_dir": str(root / "cache")},
        "method": {"kind": "full"},
        "train": {"global_batch_size": 8, "max_steps": 25, "learning_rate": rate},
    }
    config = TrainConfig.model_validate(merged(base, changes))
    return train_here(make_run(root / name, config, make_plan(config)))


def test_run_that_diverges_early_reports_it(tmp_path: Path) -> None:
    events = run_at(tmp_path, "diverged", 3.0)
    verdicts = [event for event in events if event["kind"] == "verdict"]
    assert verdicts[0]["anomaly"] == "spike"
    assert verdicts[0]["step"] <= 3
    (concern,) = values(events, "train.finished", "concern")
    assert concern.startswith("the loss ended at ")
    with pytest.raises(TrainingError, match="uniform guess"):
        run_at(tmp_path, "stopped", 3.0, stability={"on_spike": "stop"})


def test_run_that_starts_above_a_uniform_guess_and_learns_is_fine(tmp_path: Path) -> None:
    events = run_at(tmp_path, "learns", 1e-3)
    assert values(events, "train.step", "loss")[0] > GUESS + 0.2
    assert not [event for event in events if event["kind"] == "verdict"]
    assert values(events, "train.finished", "concern") == [None]
