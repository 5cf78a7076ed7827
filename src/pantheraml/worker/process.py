"""Run a worker task and report its result, errors included, as events, a log and an exit code."""

from __future__ import annotations

import contextlib
import faulthandler
import traceback
from collections.abc import Callable
from pathlib import Path

from pantheraml.base import env
from pantheraml.base.errors import PantheraError, StorageError, WorkerError
from pantheraml.base.event_stream import EventWriter
from pantheraml.base.events import ErrorRaised
from pantheraml.base.private import private_files
from pantheraml.launch.local import LOG_FILE


def run_reporting(name: str, folder: Path, work: Callable[[EventWriter], None]) -> int:
    """Run `work` and return its exit code; its events, errors included, go to `folder`."""
    faulthandler.enable()  # a crash in native code (SIGSEGV) leaves every thread's stack in the log
    with _file_permissions(name), EventWriter(folder, rank=env.process_rank().rank) as emit:
        try:
            work(emit)
        except PantheraError as err:
            return _report_error(emit, err)
        except Exception as err:  # noqa: BLE001 - top level of the process: unexpected errors are reported
            message = next(iter(str(err).splitlines()), "").rstrip(".")
            unexpected = WorkerError(
                f"The {name} worker failed: {type(err).__name__}{': ' if message else ''}{message}.",
                where=str(folder / LOG_FILE),
                fix="See the traceback in that log, or print it with `--debug`.",
            )
            return _report_error(emit, unexpected)
    return 0


def _file_permissions(name: str) -> contextlib.AbstractContextManager[None]:
    """Exported models, made to be shared, follow the umask; all other files are private to this user."""
    return contextlib.nullcontext() if name in ("export", "quantize") else private_files()


def _report_error(emit: EventWriter, err: PantheraError) -> int:
    """Write `err`, which is being handled, to the log and the events; return its exit code."""
    traceback.print_exc()
    with contextlib.suppress(StorageError):  # the parent cannot write there either, and reports that
        emit(ErrorRaised.of(err, traceback=traceback.format_exc()))
    return err.exit_code
