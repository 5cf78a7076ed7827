"""A rank is watched from loading to the end, and has more time where it waits for files."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from pantheraml.base.events import EventBase
from pantheraml.engine.guard.watchdog import StopFlag, Watchdog
from pantheraml.parallel.process_group import open_world
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import TrainConfig
from pantheraml.worker.train import make_loop, train_rank
from tests import toy
from tests.event_log import EventLog
from tests.harness import make_plan, make_run, silent


class Noting(Watchdog):
    """Knows how much time it would give now."""

    def __init__(self) -> None:
        self.long = True
        self.steps: list[int] = []

    def beat(self, step: int | None = None) -> None:
        self.long = False
        self.steps += [] if step is None else [step]

    def expect_long_work(self) -> None:
        self.long = True


def ready_run(folder: Path, steps: int) -> RunDir:
    """Every second step is saved, and the evaluation comes at the end, when the last checkpoint is on its way."""
    toy.write_llama(folder / "model", num_hidden_layers=1)
    data = str(toy.write_jsonl(folder / "data.jsonl", toy.arithmetic(40)))
    values = {
        "model": {"path": str(folder / "model")},
        "data": {"path": data, "eval_path": data, "seq_len": 48, "cache_dir": str(folder / "cache")},
        "train": {"global_batch_size": 4, "max_steps": steps},
        "checkpoint": {"every_steps": 2},
    }
    config = TrainConfig.model_validate(values)
    return make_run(folder / "run", config, make_plan(config))


def test_files_have_more_time_than_steps(tmp_path: Path) -> None:
    run, watch = ready_run(tmp_path, steps=4), Noting()
    seen: dict[str, list[bool]] = {}

    def emit(event: EventBase, /) -> None:
        seen.setdefault(event.kind, []).append(watch.long)

    with open_world(run.plan(), timeout_seconds=60) as world:
        loop = make_loop(run, run.config(), run.plan(), world, emit, StopFlag(run.stop_file), watch)
        assert watch.long, "a checkpoint may have to be read"
        loop.resume()
        assert loop.run() == "end"
    assert seen["model.ready"] == [True]
    assert seen["train.step"] == [False] * 4
    assert seen["eval.done"] == [False]
    assert seen["train.finished"] == [True], "the best weights may have to be read, and the result to be written"
    assert watch.steps == [0, 0, 1, 2, 3]


def test_a_rank_is_watched_until_the_result_is_there(tmp_path: Path) -> None:
    run = ready_run(tmp_path, steps=1)
    watched: dict[str, bool] = {}

    def emit(event: EventBase, /) -> None:
        watched[event.kind] = (run.stacks / "rank-0.txt").exists()

    with open_world(run.plan(), timeout_seconds=60) as world:
        train_rank(run, run.config(), run.plan(), world, emit, StopFlag(run.stop_file), heartbeat=silent)
    assert watched["model.ready"]
    assert watched["model.saved"]
    assert not list(run.stacks.iterdir())


@pytest.mark.parametrize("orphaned", [True, False])
def test_death_of_the_parent_is_not_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, orphaned: bool) -> None:
    run, log = ready_run(tmp_path, steps=4), EventLog()
    stop = StopFlag(run.stop_file)
    stop.signal = signal.SIGTERM
    if orphaned:
        monkeypatch.setattr("os.getppid", lambda: 1)
    with open_world(run.plan(), timeout_seconds=60) as world:
        train_rank(run, run.config(), run.plan(), world, log, stop)
    (finished,) = log.of("train.finished")
    assert finished["stopped_by"] == ("the end of its parent process" if orphaned else "request")
