"""`python -m pantheraml.worker TASK FOLDER`: a task and its folder in, events out. Started by the launcher.

The folder of `prepare`, `train` and `start` is the run's own; `generate` and `export` have one of their own with a
request in it, so that what happens to a finished run later does not enter its event stream.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from pantheraml.base import env, log
from pantheraml.base.errors import WorkerError
from pantheraml.base.events import EventWriter
from pantheraml.launch.local import die_with_parent
from pantheraml.worker.early import begin_early
from pantheraml.worker.process import run_reporting

Task = Callable[[Path, EventWriter], None]

TASKS = ("prepare", "train", "start", "generate", "export", "quantise", "verify", "replay")
TRAINING = ("train", "start")


def load_task(name: str) -> Task:
    """The function `NAME_task` of module NAME; imported alone, since `prepare` needs no training code and so on."""
    if name not in TASKS:
        raise WorkerError(f"There is no worker task {name!r}.", todo=f"Tasks are {', '.join(TASKS)}.")
    # An import leaves no garbage to speak of, and to look for some takes a sixth of its time. Nor will there be any in
    # what was imported: a collection that need not go through it takes 10 ms instead of 600.
    gc.disable()
    try:
        from transformers.utils.logging import disable_progress_bar

        task: Task = getattr(importlib.import_module(f"pantheraml.worker.{name}"), f"{name}_task")
    finally:
        gc.freeze()
        gc.enable()
    disable_progress_bar()  # what the libraries draw would end up in the log; our own progress is events
    return task


def run_task(name: str, folder: Path, events: EventWriter) -> None:
    if name in TRAINING:
        begin_early(folder)
    load_task(name)(folder, events)


def main() -> int:
    name, folder = sys.argv[1], Path(sys.argv[2])
    die_with_parent()
    log.start(debug=env.debug_requested())
    return run_reporting(name, folder, lambda events: run_task(name, folder, events))


if __name__ == "__main__":
    sys.exit(main())
