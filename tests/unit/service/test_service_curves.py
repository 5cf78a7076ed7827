"""Figures of a job for charts: one pass, thinned, smoothed before thinning, repeated steps once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pantheraml.service.jobs.curves import CurveCache, curves


def step(event: int, number: int, loss: float | None, **more: Any) -> tuple[int, str, int, str]:
    data = {"step": number, "train_loss": loss, "epoch": number / 10, "tokens": 100, "seconds": 0.5, **more}
    return event, "train.step", number, json.dumps(data)


def test_axes_evaluations_verdicts_and_the_cursor() -> None:
    rows = [
        (3, "train.started", 0, json.dumps({"total_steps": 40})),
        step(4, 1, 2.0, learning_rate=1e-4),
        step(5, 2, None),
        (6, "verdict", 2, json.dumps({"step": 2, "action": "skip", "cause": "nonfinite loss"})),
        step(7, 3, 1.0),
        (8, "eval.done", 3, json.dumps({"step": 3, "valid_loss": 1.5})),
    ]
    found = curves(rows, 2000)
    loss = found["metrics"]["train_loss"]
    assert (loss["steps"], loss["values"], loss["total"]) == ([1, 3], [2.0, 1.0], 2)
    assert (loss["epochs"], loss["tokens"], loss["seconds"]) == ([0.1, 0.3], [100, 300], [0.5, 1.5])
    held_out = found["metrics"]["valid_loss"]
    assert (held_out["steps"], held_out["values"], held_out["tokens"]) == ([3], [1.5], [300])
    assert found["metrics"].keys() == {"train_loss", "valid_loss", "learning_rate"}
    assert found["verdicts"] == [{"step": 2, "action": "skip", "cause": "nonfinite loss"}]
    assert (found["cursor"], found["step"], found["total_steps"], found["tokens"]) == (8, 3, 40, 300)


def test_a_step_that_was_repeated_counts_once() -> None:
    rows = [step(1, 1, 3.0), step(2, 2, 2.5), step(3, 2, 2.0), step(4, 3, 1.0)]
    found = curves(rows, 2000)
    assert found["metrics"]["train_loss"]["values"] == [3.0, 2.0, 1.0]
    assert found["tokens"] == 300


def test_smoothing_is_that_of_all_points_and_thinning_keeps_extremes() -> None:
    losses = [1.0 + (9.0 if number == 777 else 0.01 * (number % 7)) for number in range(1, 2001)]
    found = curves([step(number, number, loss) for number, loss in enumerate(losses, 1)], 100)
    kept = found["metrics"]["train_loss"]
    assert len(kept["steps"]) <= 100
    assert kept["total"] == 2000
    assert max(kept["values"]) == losses[776]
    mean, means = 0.0, []
    for count, loss in enumerate(losses):
        mean = loss if count == 0 else mean + max(2 / 11, 1 / (count + 1)) * (loss - mean)
        means.append(mean)
    smooth = found["smoothed"]["10"]
    assert smooth["values"] == pytest.approx([means[number - 1] for number in smooth["steps"]], rel=1e-6)


def test_nothing_yet() -> None:
    found = curves([], 2000)
    assert (found["metrics"], found["smoothed"], found["cursor"], found["step"]) == ({}, {}, 0, None)


def test_the_cache_answers_until_something_is_new() -> None:
    cache = CurveCache()
    content = cache.make("job", 10, 1, [step(1, 1, 2.0)])
    assert cache.get("job", 10, 1) == content
    assert cache.get("job", 10, 2) is None
    assert cache.get("job", 20, 1) is None
    for number in range(100):
        cache.make(f"other-{number}", 10, 1, [])
    assert cache.get("job", 10, 1) is None, "it does not grow for ever"
