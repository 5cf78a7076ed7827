"""Where a process is stuck: its stacks, in a file, once nothing was heard from it for too long.

Python's own fault handler writes them from a thread of its own, which needs no lock of the interpreter. Nothing is
killed here: ranks that wait for a stuck one give up by themselves (`parallel.timeout_seconds`), and the parent then
reads from these files which rank that was and what it was doing (`launch.stacks`).
"""

from __future__ import annotations

import faulthandler
from pathlib import Path
from types import TracebackType

SHARE = 0.8
"""Of the time that ranks wait for each other: stacks have to be there before the first one gives up."""


class StepWatch:
    def __init__(self, folder: Path, *, rank: int, timeout_seconds: float) -> None:
        self._path = folder / f"rank-{rank}.txt"
        self._seconds = SHARE * timeout_seconds

    def __enter__(self) -> StepWatch:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._path, "w", encoding="utf-8")
        self.beat()
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        if err is None:
            self._path.unlink(missing_ok=True)

    def beat(self) -> None:
        """This process is getting on."""
        faulthandler.cancel_dump_traceback_later()
        self._file.seek(0)
        self._file.truncate()
        faulthandler.dump_traceback_later(self._seconds, file=self._file)
