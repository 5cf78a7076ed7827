"""`pantheraml watch RUN_DIR`: follow a run in a terminal, from anywhere that sees its folder, over SSH for example.

It only reads events, so it neither disturbs nor stops the run. It exits with the run, with the exit code of `pantheraml
train`. If stdout is not a terminal, it prints lines.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pantheraml.readers.follow import Reader
    from pantheraml.readers.run_state import RunState

POLL_SECONDS = 0.25
SILENT_SECONDS = 60.0
"""The supervisor writes telemetry at least every 30 s; after this long without an event, check whether it is alive."""


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "watch",
        help="follow a run in the terminal",
        description="Follow a run in the terminal until it ends; Ctrl-C leaves it alone. The exit code is that of the"
        " run.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="folder of the run")
    parser.add_argument("--json", action="store_true", help="print the run's events as they come, one JSON per line")
    return parser


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from pantheraml.readers.recorded_run import require_run
    from pantheraml.readers.run_state import RunState

    folder = Path(arguments.run_dir)
    require_run(folder)
    state, console = RunState(), Console()
    readers: list[Reader] = [state]
    show: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if arguments.json:
        readers.append(_JsonLines())
    elif console.is_terminal and not console.is_dumb_terminal:
        from pantheraml.cli.watch_view import showing

        show = showing(state, folder, console)
    else:
        from pantheraml.readers.progress import ProgressBar

        readers.append(ProgressBar(str(folder), console=Console(force_terminal=False)))
    try:
        with show:
            _follow(folder, readers, state)
    except KeyboardInterrupt:
        return 0
    return _code(state)


def _follow(folder: Path, readers: Sequence[Reader], state: RunState) -> None:
    """Follow the run to its end; WorkerKilledError if its processes are gone.

    Not with a `Follower`, which disables a failing reader: here the reader is the purpose.
    """
    from pantheraml.base.event_stream import EventReader

    stream, look_at = EventReader(folder), 0.0
    while state.finished is None:
        now = time.monotonic()
        for event in stream.poll():
            look_at = now + SILENT_SECONDS
            for reader in readers:
                reader.handle(event)
        if state.finished is None and (now > look_at or _is_old(state)):
            look_at = now + SILENT_SECONDS
            _require_somebody(folder, state)
        if state.finished is None:
            time.sleep(POLL_SECONDS)


def _is_old(state: RunState) -> bool:
    return state.last_time is None or time.time() - state.last_time > SILENT_SECONDS


def _require_somebody(folder: Path, state: RunState) -> None:
    from pantheraml.base.errors import WorkerKilledError

    elsewhere = state.hardware is not None and state.hardware.host != platform.node()  # whose locks may not show here
    if elsewhere or not _is_abandoned(folder):
        return
    raise WorkerKilledError(
        "No process works on this run any more, and it did not say how it ended.",
        where=str(folder),
        fix="`pantheraml resume` continues it from its newest checkpoint.",
    )


def _is_abandoned(folder: Path) -> bool:
    """True if no process holds the run's lock. Trainers in scripts take no lock, so their runs never count as
    abandoned."""
    from pantheraml.specs.run_dir import LOCK

    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # for microseconds, in a folder that is silent
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _code(state: RunState) -> int:
    from pantheraml.base.errors import InterruptedRunError, PreemptedError, WorkerError

    status = state.status
    if status == "succeeded":
        return 0
    if state.error is not None and status in ("failed", "crashed"):
        return state.error.exit_code
    codes = {"stopped": InterruptedRunError.exit_code, "preempted": PreemptedError.exit_code}
    return codes.get(status, WorkerError.exit_code)


class _JsonLines:
    def handle(self, event: Any) -> None:
        print(event.model_dump_json(), flush=True)

    def close(self) -> None:
        """Nothing to close."""
