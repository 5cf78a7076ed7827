"""That a process gets on, and where it is if it does not.

As long as it does, it says so now and then in the event stream (`heartbeat`). Once nothing was heard from it for too
long, its stacks go to a file, and beside it the collectives that it is in. Nothing is killed here: the parent, which
ends ranks that do not get on, reads from these files which one it was and what it was doing (`launch.stacks`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TextIO

from pantheraml.base.errors import StorageError
from pantheraml.base.events import Emit, silent
from pantheraml.launch.flight_record import RankRecord, remove_record, write_record
from pantheraml.launch.stacks import DUMP_SHARE

HEARTBEAT_SHARE = 0.1
"""Of `parallel.timeout_seconds`: how often a rank says that it gets on."""
BEAT_SHARE = 0.01
"""The same, for setting the alarm anew, so that beats may be as frequent as one likes."""
LONG_WORK_SECONDS = 3600.0
"""What files may take if `parallel.timeout_seconds` is less: weights and optimizer of a model of 70 billion parameters
are 840 GB, which a shared disk of 0.3 GB/s has in 47 minutes. Nobody sees from outside how far a disk is."""

LOCKED_SECONDS = 5.0
"""How much later Python's fault handler writes the stacks by itself, if somebody keeps the interpreter's lock. That is
for the worst case alone: it reads the stacks of threads that run, and crashes one time in a hundred where one of them
executes Python."""

CLOSE_SECONDS = 1.0
"""For an alarm that is going off to end."""


class Watch:
    """Of nobody: as a run has it that nothing would read stacks of."""

    def beat(self, step: int | None = None) -> None:
        """This process is getting on, and has taken so many steps (None: as many as before)."""

    def expect_long_work(self) -> None:
        """Until the next beat this process may take long, as for a slow disk."""


class StepWatch(Watch):
    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        timeout_seconds: float,
        long_work_seconds: float = LONG_WORK_SECONDS,
        collectives: Callable[[], RankRecord] | None = None,
        heartbeat: Emit = silent,
    ) -> None:
        """`collectives` gives those that this process is in, if it has peers; it is called in a thread."""
        self._folder, self._rank = folder, rank
        self._timeout, self._long = timeout_seconds, max(timeout_seconds, long_work_seconds)
        self._heartbeat = heartbeat
        self._step: int | None = None
        self._last_alarm: float | None = None
        self._last_heartbeat: float | None = None
        self._collectives = collectives

    def __enter__(self) -> StepWatch:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path = self._folder / f"rank-{self._rank}.txt"
        self._file = open(self._path, "w", encoding="utf-8")
        self._alarm = _Alarm(self._folder, self._rank, self._file, self._collectives)
        self.expect_long_work()
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self._alarm.close()
        self._file.close()
        if err is None:
            self._path.unlink(missing_ok=True)
            remove_record(self._folder, self._rank)

    def beat(self, step: int | None = None) -> None:
        now = time.monotonic()
        if self._last_alarm is None or now - self._last_alarm > BEAT_SHARE * self._timeout:
            self._alarm.set(DUMP_SHARE * self._timeout)
            self._last_alarm = now
        self._step = self._step if step is None else step
        known = self._step is not None  # nobody was told before how far a run had come that is resumed
        if known and (self._last_heartbeat is None or now - self._last_heartbeat > HEARTBEAT_SHARE * self._timeout):
            self._last_heartbeat = now
            self._heartbeat("heartbeat", step=self._step)

    def expect_long_work(self) -> None:
        self._alarm.set(DUMP_SHARE * self._long)
        self._last_alarm = None


class _Alarm:
    """Some time after it was set for the last time, it writes down where this process is."""

    def __init__(self, folder: Path, rank: int, stacks: TextIO, collectives: Callable[[], RankRecord] | None) -> None:
        self._folder, self._rank, self._file, self._collectives = folder, rank, stacks, collectives
        self._changed = threading.Condition()
        self._due: float | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="alarm", daemon=True)
        self._thread.start()

    def set(self, seconds: float) -> None:
        with self._changed:
            faulthandler.cancel_dump_traceback_later()
            self._file.seek(0)
            self._file.truncate()
            faulthandler.dump_traceback_later(seconds + LOCKED_SECONDS, file=self._file)
            was_due, self._due = self._due, time.monotonic() + seconds
            if was_due is None:
                remove_record(self._folder, self._rank)
            if was_due is None or was_due > self._due:  # else the thread wakes early enough to see the new time
                self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
            faulthandler.cancel_dump_traceback_later()
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while self._wait_until_due():
            if self._collectives is None:
                continue
            record = self._collectives()  # unlocked: should a driver not answer, training must not wait for this thread
            with (
                self._changed,
                contextlib.suppress(StorageError),
            ):  # the stacks tell the rest, if a disk still takes them
                if self._due is None and not self._closed:
                    write_record(self._folder, self._rank, record)

    def _wait_until_due(self) -> bool:
        """And write the stacks, then, while nobody else executes Python; False: it will not be due any more."""
        with self._changed:
            while not self._closed:
                left = None if self._due is None else self._due - time.monotonic()
                if left is not None and left <= 0:
                    self._due = None
                    faulthandler.cancel_dump_traceback_later()
                    faulthandler.dump_traceback(self._file)
                    return True
                self._changed.wait(left)
        return False
