"""That a process gets on, and where it is if it does not.

As long as it does, it says so now and then in the event stream (`heartbeat`). Once nothing was heard from it for too
long, its stacks go to a file, written by Python's own fault handler from a thread that needs no lock of the
interpreter. Nothing is killed here: ranks that wait for a stuck one give up by themselves
(`parallel.timeout_seconds`), and the parent, which ends those that do not, reads from these files which rank it was and
what it was doing (`launch.stacks`).
"""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from pantheraml.launch.stacks import DUMP_SHARE

HEARTBEAT_SHARE = 0.1
"""Of `parallel.timeout_seconds`: how often a rank says that it gets on."""
BEAT_SHARE = 0.01
"""The same, for setting the alarm anew, so that beats may be as frequent as one likes."""


class StepWatch:
    def __init__(
        self, folder: Path, *, rank: int, timeout_seconds: float, heartbeat: Callable[[], None] = lambda: None
    ) -> None:
        self._path = folder / f"rank-{rank}.txt"
        self._timeout, self._heartbeat = timeout_seconds, heartbeat
        self._last_alarm: float | None = None
        self._last_heartbeat: float | None = None

    def __enter__(self) -> StepWatch:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._path, "w", encoding="utf-8")
        self.beat()
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self.pause()
        self._file.close()
        if err is None:
            self._path.unlink(missing_ok=True)

    def beat(self) -> None:
        """This process is getting on."""
        now = time.monotonic()
        if self._last_alarm is None or now - self._last_alarm > BEAT_SHARE * self._timeout:
            self._last_alarm = now
            faulthandler.cancel_dump_traceback_later()
            self._file.seek(0)
            self._file.truncate()
            faulthandler.dump_traceback_later(DUMP_SHARE * self._timeout, file=self._file)
        if self._last_heartbeat is None or now - self._last_heartbeat > HEARTBEAT_SHARE * self._timeout:
            self._last_heartbeat = now
            self._heartbeat()

    def pause(self) -> None:
        """Until the next beat this process may take as long as it likes, as for a slow disk."""
        faulthandler.cancel_dump_traceback_later()
        self._last_alarm = None
