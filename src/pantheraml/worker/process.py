"""The border of a worker process: whatever happens inside leaves it as events, a log and an exit code."""

from __future__ import annotations

import contextlib
import faulthandler
import traceback
from collections.abc import Callable
from pathlib import Path

from pantheraml.base import env
from pantheraml.base.errors import PantheraError, StorageError, WorkerError
from pantheraml.base.events import EventWriter, emit_error
from pantheraml.base.private import private_files
from pantheraml.launch.local import LOG_FILE


def run_reporting(name: str, folder: Path, work: Callable[[EventWriter], None]) -> int:
    """The exit code of `work`, which writes its events, errors included, into `folder`."""
    faulthandler.enable()  # a crash in native code (SIGSEGV) leaves every thread's stack in the log
    with _for_whom(name), EventWriter(folder, rank=env.process_rank().rank) as emit:
        try:
            work(emit)
        except PantheraError as err:
            return _told(emit, err)
        except Exception as err:  # noqa: BLE001 - the border of the process: anything unforeseen is reported, not lost
            said = next(iter(str(err).splitlines()), "").rstrip(".")
            unforeseen = WorkerError(
                f"The {name} worker failed: {type(err).__name__}{': ' if said else ''}{said}.",
                where=str(folder / LOG_FILE),
                todo="The full traceback is in that log; `--debug` prints it.",
            )
            return _told(emit, unforeseen)
    return 0


def _for_whom(name: str) -> contextlib.AbstractContextManager[None]:
    """Models that are made to be given away are for whom the umask says; all else is for this user alone."""
    return contextlib.nullcontext() if name in ("export", "quantise") else private_files()


def _told(emit: EventWriter, err: PantheraError) -> int:
    """The exit code of `err`, which is being handled, and is in the log and in the events if these can be written."""
    traceback.print_exc()
    with contextlib.suppress(StorageError):  # then the parent cannot write there either, and says so
        emit_error(emit, err, traceback=traceback.format_exc())
    return err.exit_code
