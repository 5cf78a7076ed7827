"""Rank script of test_out_of_memory: memory ends on the last rank only, as simulated readings tell it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from pantheraml.base.event_stream import EventWriter
from pantheraml.engine.guard.watchdog import StopFlag
from pantheraml.engine.memory import headroom
from pantheraml.parallel.process_group import open_world
from pantheraml.specs.run_dir import RunDir
from pantheraml.worker.train import train_rank
from tests.harness import silent

FALLING = (0.08, 0.06, 0.04, 0.02)


def main() -> None:
    for place in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        run = RunDir(Path(place))
        with open_world(run.plan(), timeout_seconds=60) as world, EventWriter(run.path) as emit:
            ends = run.path.name.startswith("short") and world.rank == world.size - 1
            left: Iterator[float] = iter(FALLING if ends else ())

            def read(device: torch.device, fraction: float | None, left: Iterator[float] = left) -> float:
                return next(left, math.inf)

            headroom.READ_EVERY, headroom.share_left = 1, read
            output = emit if world.is_main else silent
            train_rank(run, run.config(), run.plan(), world, output, StopFlag(run.stop_file))


if __name__ == "__main__":
    main()
