"""Sharded ranks cannot retry a step alone after running out of memory: all restart with smaller micro-batches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pantheraml.base.errors import OutOfMemoryError
from pantheraml.base.events import Event
from tests.e2e.conftest import Playground
from tests.event_log import raw_events
from tests.harness import values

pytestmark = pytest.mark.extended

SETTINGS = ("train.max_steps=4", "checkpoint.every_steps=2", "checkpoint.background=false", "method.rank=4")
STEPS = [part for setting in SETTINGS for part in ("--set", setting)]


def losses(events: list[Event]) -> dict[int, float]:
    """Final loss of each step."""
    return dict(zip(values(events, "train.step", "step"), values(events, "train.step", "loss"), strict=True))


def test_sharded_ranks_restart_with_smaller_micro_batches_down_to_one_sequence(playground: Playground) -> None:
    tested = replace(playground, environment={**playground.environment, "PANTHERAML_FAULTS": "1:3:oom,0:4:oom"})
    sharded = [*STEPS, "--nproc", "2", "--set", "parallel.shard=2"]
    assert playground.train("runs/roomy", *STEPS).code == 0
    ended = tested.train("runs/tight", *sharded, "--set", "train.micro_batch_size=2")
    assert ended.code == OutOfMemoryError.exit_code, ended
    assert "On rank 1, with 2 sequences at a time, the machine ran out of memory" in ended.err
    assert "Resuming from step 2 with one sequence per micro-batch" in ended.err
    assert "train.activation_checkpointing=selective" in ended.err
    assert "micro_batch_size" not in ended.err, "there is nothing smaller than one"
    assert "Traceback" not in ended.err
    resumed = tested("resume", "runs/tight")
    assert resumed.code == 0, resumed
    roomy, tight = (raw_events(playground.root / "runs" / name) for name in ("roomy", "tight"))
    assert values(tight, "train.started", "first_step") == [1, 3, 3]
    assert losses(tight) == pytest.approx(losses(roomy), rel=1e-5)
