"""Smaller micro-batches before memory ends. Readings of a GPU are simulated; the runs are real, on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch

from pantheraml.engine.memory import headroom
from pantheraml.engine.memory.headroom import READ_EVERY, Headroom, MemoryTrend, compare_with_plan
from pantheraml.engine.step.step_report import RankNumbers, StepReport
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import TrainConfig
from tests import toy
from tests.harness import make_plan, make_run, train_here, values


def first_alarm(shares: Iterable[float]) -> tuple[int, int] | None:
    """Number of the reading that gives an alarm, and the steps to the end that it tells."""
    trend = MemoryTrend()
    for number, share in enumerate(shares):
        left = trend.add(number * READ_EVERY, share)
        if left is not None:
            return number, left
    return None


def test_an_end_that_is_near_is_told_before_it_comes() -> None:
    found = first_alarm(0.12 - 0.01 * number for number in range(12))
    assert found is not None
    number, left = found
    share = 0.12 - 0.01 * number
    assert 0 < share < 0.1
    assert left == pytest.approx(share / 0.01 * READ_EVERY, abs=1)


@pytest.mark.parametrize(
    "shares",
    [
        [0.03] * 50,
        [0.5 - 0.01 * number for number in range(40)],
        [0.09 - 1e-5 * number for number in range(200)],
        [0.02 + 0.001 * number for number in range(50)],
        [0.05 + 0.0005 * (-1) ** number for number in range(50)],
        [math.inf] * 50,
    ],
    ids=["little, but steady", "much is left", "slow", "rising", "noise", "never read"],
)
def test_no_alarm(shares: list[float]) -> None:
    assert first_alarm(shares) is None


def test_memory_that_has_ended_already() -> None:
    found = first_alarm([0.03, 0.02, 0.01, -0.01])
    assert found == (3, 0)


def test_after_an_alarm_the_trend_starts_anew() -> None:
    trend = MemoryTrend()
    falling = [0.08, 0.06, 0.04, 0.02]
    assert [trend.add(step * READ_EVERY, share) is not None for step, share in enumerate(falling * 2)] == [
        *(False, False, False, True),
        *(False, False, False, True),
    ]


def test_a_cpu_has_no_readings() -> None:
    cpu = torch.device("cpu")
    reader = Headroom(cpu, None)
    assert {reader.read() for _ in range(3 * READ_EVERY)} == {math.inf}
    config = TrainConfig.model_validate({"model": {"path": "m"}, "data": {"path": "d"}})
    assert compare_with_plan(make_plan(config), cpu, step=2, allocated=1) is None


def test_the_rank_with_the_least_counts() -> None:
    empty = RankNumbers(*[0.0] * len(RankNumbers._fields))
    ranks = [empty._replace(memory_left=share) for share in (math.inf, 0.2, 0.05)]
    assert StepReport(None, ranks, shares_sequences=False).memory_left == 0.05  # type: ignore[arg-type]


# -- runs


@pytest.fixture
def root(tmp_path: Path) -> Path:
    toy.write_llama(tmp_path / "model")
    toy.write_jsonl(tmp_path / "data.jsonl", toy.arithmetic(60))
    return tmp_path


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterable[float]], None]:
    """Gives the readings of a run, one for each step; the last one stays."""

    def use(shares: Iterable[float]) -> None:
        given: Iterator[float] = iter(shares)
        last = [math.inf]

        def read(device: torch.device, fraction: float | None) -> float:
            last[0] = next(given, last[0])
            return last[0]

        monkeypatch.setattr(headroom, "READ_EVERY", 1)
        monkeypatch.setattr(headroom, "share_left", read)

    return use


def make(root: Path, name: str, micro: int) -> RunDir:
    config = TrainConfig.model_validate(
        {
            "model": {"path": str(root / "model")},
            "data": {"path": str(root / "data.jsonl"), "seq_len": 48, "cache_dir": str(root / "cache")},
            "method": {"rank": 4},
            "train": {"global_batch_size": 8, "max_steps": 10, "learning_rate": 1e-2, "schedule": "constant"},
        }
    )
    return make_run(root / name, config, make_plan(config, micro=micro))


FALLING = [0.08, 0.06, 0.04, 0.02]


def test_a_run_takes_smaller_micro_batches_with_the_same_result(
    root: Path, left: Callable[[Iterable[float]], None]
) -> None:
    expected = values(train_here(make(root, "whole", 8)), "train.step", "loss")
    left([*FALLING, 0.3])
    run = make(root, "shrinking", 8)
    events = train_here(run)
    assert values(events, "train.step", "loss") == pytest.approx(expected, rel=1e-5)
    (warning,) = values(events, "warning", "message")
    assert warning.startswith("memory that is left on a GPU falls, and would end in about")
    assert "4 sequences at a time from now on instead of 8" in warning
    resumed = max(run.checkpoints.iterdir())
    assert '"micro_batch": 4' in (resumed / "state.json").read_text(encoding="utf-8")


def test_a_single_sequence_is_saved_instead(root: Path, left: Callable[[Iterable[float]], None]) -> None:
    left([*FALLING, 0.3])
    events = train_here(make(root, "single", 1))
    (warning,) = values(events, "warning", "message")
    assert "--set train.activation_checkpointing=full` continues from step 4." in warning
    assert 4 in values(events, "checkpoint.saved", "step")
