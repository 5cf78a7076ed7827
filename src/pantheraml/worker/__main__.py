"""`python -m pantheraml.worker TASK FOLDER`: a task and its folder in, events out. Started by the launcher.

The folder of `prepare` and `train` is the run's own; `generate` and `export` have one of their own with a request in
it, so that what happens to a finished run later does not enter its event stream.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from pantheraml.base import env, log
from pantheraml.base.errors import PantheraError, WorkerError
from pantheraml.base.events import EventWriter, emit_error
from pantheraml.launch.local import LOG_FILE, die_with_parent

Task = Callable[[Path, EventWriter], None]

TASKS = ("prepare", "train", "generate", "export")


def load_task(name: str) -> Task:
    """The function `NAME_task` of module NAME; imported alone, since `prepare` needs no training code and so on."""
    if name not in TASKS:
        raise WorkerError(f"There is no worker task {name!r}.", todo=f"Tasks are {', '.join(TASKS)}.")
    task: Task = getattr(importlib.import_module(f"pantheraml.worker.{name}"), f"{name}_task")
    disable_progress_bar()  # what the libraries draw would end up in the log; our own progress is events
    return task


def main() -> int:
    name, folder = sys.argv[1], Path(sys.argv[2])
    die_with_parent()
    log.start(debug=env.debug_requested())
    with EventWriter(folder, rank=env.process_rank().rank) as emit:
        try:
            load_task(name)(folder, emit)
        except PantheraError as err:
            traceback.print_exc()
            emit_error(emit, err, traceback=traceback.format_exc())
            return err.exit_code
        except Exception as err:  # noqa: BLE001 - the border of the process: anything unforeseen is reported, not lost
            unforeseen = WorkerError(
                f"The {name} worker failed: {type(err).__name__}: {str(err).splitlines()[0] if str(err) else ''}",
                where=str(folder / LOG_FILE),
                todo="The full traceback is in that log; `--debug` prints it.",
            )
            traceback.print_exc()
            emit_error(emit, unforeseen, traceback=traceback.format_exc())
            return unforeseen.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
