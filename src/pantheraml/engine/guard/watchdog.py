"""Watchdog and stop flag of a worker process.

`StackDumpWatchdog` emits `heartbeat` events while a rank makes progress. After too long without a beat it dumps the
Python stacks to a file, and torch's flight recorder (the collectives in flight) to another. It kills nothing: the
launcher, which ends stuck ranks, reads from these files which rank it was and what it was doing (`launch.stacks`).

`StopFlag` is how a worker learns that it should stop: from a file that the launcher puts into the run folder (Ctrl-C on
this node), or from a signal (schedulers, or a launcher that died). Either only sets a flag; the loop checks it between
steps, where all ranks agree to stop, save and exit cleanly.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TextIO

from torch._C import _distributed_c10d

from pantheraml.base.errors import StorageError
from pantheraml.base.events import Emit, Heartbeat, silent
from pantheraml.launch.flight_record import Collective, RankRecord, remove_record, write_record
from pantheraml.launch.local import PREEMPTION_SIGNALS
from pantheraml.launch.stacks import DUMP_SHARE

HEARTBEAT_SHARE = 0.1
"""Interval of heartbeats, relative to `parallel.timeout_seconds`."""
BEAT_SHARE = 0.01
"""Shortest interval between alarm resets, relative to `parallel.timeout_seconds`; makes frequent beats cheap."""
LONG_WORK_SECONDS = 3600.0
"""Timeout for file I/O if `parallel.timeout_seconds` is less: weights and optimizer state of a 70B model are 840 GB,
which take 47 minutes on a shared disk of 0.3 GB/s. The progress of a disk is not visible from outside."""

LOCKED_SECONDS = 5.0
"""Delay after which Python's fault handler dumps the stacks on its own, in case a thread holds the GIL. A last resort:
it reads the stacks of running threads, and crashes about once in a hundred times if one of them executes Python."""

CLOSE_SECONDS = 1.0
"""How long `close` waits for a dump in progress."""


class Watchdog:
    """No-op watchdog."""

    def beat(self, step: int | None = None) -> None:
        """Report progress. `step`: optimizer steps done; None: unchanged."""

    def expect_long_work(self) -> None:
        """Allow the longer timeout until the next beat, such as for a slow disk."""


class StackDumpWatchdog(Watchdog):
    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        timeout_seconds: float,
        long_work_seconds: float = LONG_WORK_SECONDS,
        collectives: Callable[[], RankRecord] | None = None,
        heartbeat: Emit = silent,
        on_stuck: Callable[[Path], None] | None = None,
    ) -> None:
        """`collectives`: returns the collectives in flight, if there are other ranks; `on_stuck`: called with the file
        of the stacks once they are dumped. Both run in a thread."""
        self._folder, self._rank = folder, rank
        self._timeout, self._long = timeout_seconds, max(timeout_seconds, long_work_seconds)
        self._heartbeat, self._on_stuck = heartbeat, on_stuck
        self._step: int | None = None
        self._last_alarm: float | None = None
        self._last_heartbeat: float | None = None
        self._collectives = collectives

    def __enter__(self) -> StackDumpWatchdog:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path = self._folder / f"rank-{self._rank}.txt"
        self._file = open(self._path, "w", encoding="utf-8")
        self._alarm = _Alarm(self._folder, self._rank, self._file, self._collectives, self._on_stuck)
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
        known = self._step is not None  # unknown until a resumed run has loaded its checkpoint
        if known and (self._last_heartbeat is None or now - self._last_heartbeat > HEARTBEAT_SHARE * self._timeout):
            self._last_heartbeat = now
            self._heartbeat(Heartbeat(step=self._step))

    def expect_long_work(self) -> None:
        self._alarm.set(DUMP_SHARE * self._long)
        self._last_alarm = None


class _Alarm:
    """Dumps stacks and collectives when it has not been reset for some time."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        stacks: TextIO,
        collectives: Callable[[], RankRecord] | None,
        on_stuck: Callable[[Path], None] | None,
    ) -> None:
        self._folder, self._rank, self._file, self._collectives = folder, rank, stacks, collectives
        self._on_stuck = on_stuck
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
            if was_due is None or was_due > self._due:  # else the thread wakes up early enough to see the new time
                self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
            faulthandler.cancel_dump_traceback_later()
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while self._wait_until_due():
            if self._on_stuck is not None:
                self._on_stuck(Path(self._file.name))
            if self._collectives is None:
                continue
            record = self._collectives()  # without the lock: training must not wait for this thread if a driver hangs
            with (
                self._changed,
                contextlib.suppress(StorageError),
            ):  # the stacks are still there if this write fails
                if self._due is None and not self._closed:
                    write_record(self._folder, self._rank, record)

    def _wait_until_due(self) -> bool:
        """Wait, then dump the stacks while no other thread executes Python; False once closed."""
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


def recorded_collectives(backend: str) -> RankRecord:
    """Collectives in torch's flight recorders, for a process whose main group uses `backend`.

    There is one recorder for NCCL and one for the CPU backends: a run on GPUs has groups of both kinds.
    """
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace", "_dump_nccl_trace") if backend == "nccl" else ("_dump_fr_trace",):
        # torch has no public or typed name for these; the second exists in its CUDA builds only
        entries += pickle.loads(getattr(_distributed_c10d, name)(includeStackTraces=False)).get("entries", [])
    return RankRecord.of(map(Collective.from_entry, entries))


class StopFlag:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._parent = os.getppid()
        self.signal: signal.Signals | None = None
        """First signal received."""

    @property
    def lost_parent(self) -> bool:
        """Whether the parent process died without requesting a stop: then the kernel sent the signal."""
        return os.getppid() != self._parent and not self._file.exists()

    def is_raised(self) -> bool:
        return self.signal is not None or self._file.exists()

    @contextmanager
    def listening(self) -> Iterator[StopFlag]:
        def on_signal(number: int, frame: FrameType | None) -> None:
            self.signal = self.signal or signal.Signals(number)

        # Ctrl-C is handled by the launcher; a SIGINT that still arrives here must not kill a rank in mid-step.
        before = {number: signal.signal(number, on_signal) for number in (*PREEMPTION_SIGNALS, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
