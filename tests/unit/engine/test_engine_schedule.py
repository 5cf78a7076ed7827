from __future__ import annotations

import itertools

import pytest

from pantheraml.engine.optim.schedule import learning_rate
from pantheraml.specs.train import TrainSettings


def rates(total: int, **settings: object) -> list[float]:
    config = TrainSettings.model_validate({"learning_rate": 1.0, **settings})
    return [learning_rate(config, step, total) for step in range(total)]


def test_warmup_is_linear_up_to_the_peak() -> None:
    assert rates(8, warmup_steps=4, schedule="constant") == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_linear_schedule_decreases_evenly() -> None:
    assert rates(5, schedule="linear") == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_halves_in_the_middle_and_ends_at_its_floor() -> None:
    curve = rates(11, schedule="cosine", min_learning_rate_ratio=0.1)
    assert curve[0] == 1.0
    assert learning_rate(TrainSettings(learning_rate=1.0), 5, 10) == pytest.approx(0.5)
    assert all(a > b for a, b in itertools.pairwise(curve))
    assert learning_rate(TrainSettings(learning_rate=1.0, min_learning_rate_ratio=0.1), 11, 11) == pytest.approx(0.1)
