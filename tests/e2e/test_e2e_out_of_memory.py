"""Ranks that hold parts of each other's weights cannot take a step again alone: all start anew, with smaller passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pantheraml.base.errors import OutOfMemoryError
from pantheraml.base.events import Event, read_events
from tests.e2e.conftest import Playground
from tests.harness import values

SETTINGS = ("train.max_steps=4", "checkpoint.every_steps=2", "checkpoint.background=false", "method.rank=4")
STEPS = [part for setting in SETTINGS for part in ("--set", setting)]


def losses(events: list[Event]) -> dict[int, float]:
    """Of each step, as it came out in the end."""
    return dict(zip(values(events, "train.step", "step"), values(events, "train.step", "loss"), strict=True))


def test_shards_start_again_and_one_sequence_is_the_end(playground: Playground) -> None:
    tested = replace(playground, environment={**playground.environment, "PANTHERAML_FAULTS": "1"})
    sharded = [*STEPS, "--nproc", "2", "--set", "parallel.shard=2", "--set", 'faults=["1:3:oom", "0:4:oom"]']
    assert playground.train("runs/roomy", *STEPS).code == 0
    ended = tested.train("runs/tight", *sharded, "--set", "train.micro_batch_size=2")
    assert ended.code == OutOfMemoryError.exit_code, ended
    assert "On rank 1, with 2 sequences at a time, the machine ran out of memory" in ended.err
    assert "The run goes on from step 2 with one sequence at a time" in ended.err
    assert "train.activation_checkpointing=selective" in ended.err
    assert "micro_batch_size" not in ended.err, "there is nothing smaller than one"
    assert "Traceback" not in ended.err
    resumed = tested("resume", "runs/tight")
    assert resumed.code == 0, resumed
    roomy, tight = (read_events(playground.root / "runs" / name) for name in ("roomy", "tight"))
    assert values(tight, "train.started", "first_step") == [1, 3, 3]
    assert losses(tight) == pytest.approx(losses(roomy), rel=1e-5)
