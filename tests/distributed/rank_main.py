"""Rank script: trains every run folder named on the command line, in one process group."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from pantheraml.base.event_stream import EventWriter
from pantheraml.engine.guard.watchdog import StopFlag
from pantheraml.parallel.process_group import open_world
from pantheraml.specs.run_dir import RunDir
from pantheraml.worker.train import train_rank


def main(before: Callable[[RunDir], None] | None = None) -> None:
    """`before` is called with each run before it is trained."""
    runs = [RunDir(Path(name)) for name in json.loads(Path(sys.argv[1]).read_text())]
    with open_world(runs[0].plan(), timeout_seconds=300) as world:
        for run in runs:
            if before is not None:
                before(run)
            with EventWriter(run.path, rank=world.rank) as events:
                emit = events if world.is_main else lambda event: None
                train_rank(run, run.config(), run.plan(), world, emit, StopFlag(run.stop_file))


if __name__ == "__main__":
    main()
