"""`python -m pantheraml.worker TASK FOLDER`: run one task and write its events. Started by the launcher.

`prepare`, `train` and `prepare_and_train` use the run folder. `generate`, `export` and others use a separate folder
with a request in it, so that they do not add to the event stream of a finished run.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from pantheraml.base import env, log
from pantheraml.base.errors import WorkerError
from pantheraml.base.event_stream import EventWriter
from pantheraml.base.imports import quick_imports
from pantheraml.launch.local import die_with_parent
from pantheraml.worker.prefetch import prefetch_for
from pantheraml.worker.process import run_reporting

Task = Callable[[Path, EventWriter], None]

TASKS = (
    *("prepare", "train", "prepare_and_train", "preview"),
    *("generate", "export", "quantize", "verify", "replay", "profile", "collective"),
)
TRAINING = ("train", "prepare_and_train")


def load_task(name: str) -> Task:
    """Import module NAME and return its `NAME_task`. Only that module: `prepare`, for one, needs no training code."""
    if name not in TASKS:
        raise WorkerError(f"Unknown worker task {name!r}.", fix=f"Use one of {', '.join(TASKS)}.")
    with quick_imports():
        from transformers.utils.logging import disable_progress_bar

        task: Task = getattr(importlib.import_module(f"pantheraml.worker.{name}"), f"{name}_task")
    disable_progress_bar()  # library progress bars would go to the log; our progress is events
    return task


def run_task(name: str, folder: Path, events: EventWriter) -> None:
    if name in TRAINING:
        prefetch_for(folder)
    load_task(name)(folder, events)


def main() -> int:
    name, folder = sys.argv[1], Path(sys.argv[2])
    die_with_parent()
    log.start(debug=env.debug_requested())
    return run_reporting(name, folder, lambda events: run_task(name, folder, events))


if __name__ == "__main__":
    sys.exit(main())
