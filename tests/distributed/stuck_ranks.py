"""Rank script of test_stuck: four ranks in overlapping groups of two.

The last rank is late, and the others dump their collectives meanwhile. Rank 0 also writes the timeouts of all groups.
"""

from __future__ import annotations

import datetime
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from pantheraml.engine.guard.watchdog import StackDumpWatchdog, recorded_collectives
from pantheraml.launch.flight_record import RankRecord, read_records
from pantheraml.specs.multi_gpu import MultiGPUConfig
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.train import TrainConfig
from pantheraml.worker.train import join_world
from tests.harness import make_plan

TIMEOUT = 200


def timeout_of(group: dist.ProcessGroup) -> float:
    allowed: datetime.timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return allowed.total_seconds()


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def begun(record: RankRecord) -> int:
    """Number of collectives that a rank has started, over all groups."""
    return sum(record.begun(group) or 0 for group in {one.group for one in record.collectives})


def recorded_after(count: int, *, waits: bool) -> RankRecord:
    """Dump once this rank has started `count` collectives and all are done, except the last if it `waits` in that: on a
    busy machine it may get there only after the alarm."""

    def is_there() -> bool:
        record = recorded_collectives("gloo")
        done = [one.done for one in record.collectives]
        return begun(record) == count and done == [True] * (len(done) - waits) + [False] * waits

    wait_until(is_there)
    return recorded_collectives("gloo")


def main() -> None:
    folder = Path(sys.argv[1])
    config = TrainConfig.model_validate({"model": {"path": "none"}, "data": {"path": "none"}})
    plan = make_plan(config, dims=ParallelDims(replicate=2, tensor=2))
    with join_world(MultiGPUConfig(timeout_seconds=TIMEOUT), plan) as world:
        tensor, replicate = world.layout.group("tensor"), world.layout.group("replicate")
        both = world.layout.group("replicate", "tensor")
        for group in (tensor, replicate):
            dist.all_reduce(torch.ones(1), group=group)
        world.wait_for_main()
        if world.is_main:
            found = {str(number): timeout_of(group) for number, group in enumerate((tensor, replicate, both))}
            assert dist.group.WORLD is not None
            (folder / "timeouts.json").write_text(json.dumps({"main": timeout_of(dist.group.WORLD), **found}))
        count = begun(recorded_collectives("gloo")) + {3: 0, 2: 1}.get(world.rank, 2)
        with StackDumpWatchdog(
            folder / "stacks",
            rank=world.rank,
            timeout_seconds=0.5,
            collectives=lambda: recorded_after(count, waits=world.rank != 3),
        ) as watch:
            watch.beat()
            if world.rank == 3:
                wait_until(lambda: len(read_records(folder / "stacks")) == 4)
                shutil.copytree(folder / "stacks", folder / "kept")
            for group in (tensor, replicate):
                dist.all_reduce(torch.ones(1), group=group)
