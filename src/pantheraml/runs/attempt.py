"""One attempt of a run: the processes of one start, the events they write, and the error they end with.

A run has several attempts if it is restarted (`restarts`). The supervisor never imports torch; everything it knows of
the workers comes from their events, their log and their exit status.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pantheraml.base.errors import StorageError, WorkerError, WorkerKilledError
from pantheraml.base.events import ErrorRaised, TrainFinished, TrainStarted, TrainStopped
from pantheraml.launch import local
from pantheraml.launch.stacks import HangWatch, explain_hang
from pantheraml.readers.follow import Follower
from pantheraml.runs import errors
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import TrainConfig


@dataclass(frozen=True)
class WorkerCommand:
    """How the workers of an attempt are started and stopped."""

    command: list[str]
    environment: dict[str, str]
    ask_to_stop: Callable[[], None] | None
    """Called on the first stop request; None: nothing to save, so the workers are terminated."""
    on_tick: Callable[[], None] = lambda: None


class Attempt:
    """Follows the events of one start, and keeps those that decide how it ended."""

    def __init__(self, follower: Follower, *, training: bool = False) -> None:
        self._follower = follower
        self.training = training
        """Training has begun, in this attempt or an earlier one."""
        self.errors: list[ErrorRaised] = []
        self.stopped_by: str | None = None
        self.signal: str | None = None
        """The signal that stopped a worker, if the worker reported it."""

    def next(self) -> Attempt:
        """The attempt after this one, on the same event stream; errors up to now no longer count."""
        self.poll()
        return Attempt(self._follower, training=self.training)

    @property
    def own_errors(self) -> list[ErrorRaised]:
        """Errors other than a plain WorkerError. When one rank fails, its peers lose the connection and fail with a
        WorkerError, which must not hide the cause."""
        return [event for event in self.errors if event.error != WorkerError.__name__]

    def poll(self) -> None:
        """Read new events."""
        for event in self._follower.poll():
            if isinstance(event, ErrorRaised):
                self.errors.append(event)
            elif isinstance(event, TrainStarted):
                self.training = True
            elif isinstance(event, TrainStopped):
                self.signal = self.signal or event.signal
            elif isinstance(event, TrainFinished):
                self.stopped_by = event.stopped_by

    def close(self) -> None:
        self.poll()
        self._follower.close()

    def supervise(self, run: RunDir, config: TrainConfig, workers: WorkerCommand, stops: local.StopRequests) -> None:
        """Run the workers to their end. Raises the error that they ended with."""
        log = run.path / local.LOG_FILE
        log_from = log.stat().st_size if log.exists() else 0
        shutil.rmtree(run.stacks, ignore_errors=True)  # of an earlier attempt
        hang_watch = HangWatch(run.stacks, timeout_seconds=config.parallel.timeout_seconds)

        def tick() -> None:
            self.poll()
            workers.on_tick()
            if hang_watch.is_hung():
                self.raise_reported()  # the stuck ranks may be waiting for one that failed
                raise errors.hang(run)

        status = local.run_workers(
            workers.command,
            run.path,
            environment=workers.environment,
            stops=stops,
            ask_to_stop=workers.ask_to_stop,
            grace_seconds=config.parallel.grace_seconds,
            on_tick=tick,
        )
        self.poll()
        if not run.path.is_dir():
            raise StorageError(
                "The run folder is gone, and with it the run's events and checkpoints.",
                where=str(run.path),
                fix="Restore it (was a disk unmounted, or the folder moved?) and resume, or start the run again.",
            )
        if local.was_killed_by_signal(status) and not stops.count:
            # No stop was requested: the kernel sends SIGTERM to ranks whose agent died, and they save and exit.
            self.stopped_by = self.signal = None
        # The request may have reached the workers or the agent, and not this process.
        if (stops.count or self.stopped_by == "request") and status and not self.own_errors:
            raise errors.stopped(run, self.stop_signal(stops))
        self.raise_for(run.path, status, log_from=log_from)

    def stop_signal(self, stops: local.StopRequests) -> str | None:
        """Name of the signal that asked for the stop; None if it is not known."""
        return self.signal if stops.first is None else stops.first.name

    def raise_reported(self) -> None:
        """Raise the error that the workers reported, if any."""
        if self.errors:
            raise errors.from_event((self.own_errors or self.errors)[0])

    def raise_for(self, folder: Path, status: int, *, log_from: int) -> None:
        """Raise what the workers reported, or what their log and exit status say; nothing if they succeeded."""
        if self.own_errors:
            raise errors.from_event(self.own_errors[0])
        death = local.explain_death(folder, status, log_from=log_from)
        if death is not None:
            tail = local.log_tail(folder, lines=8, begin=log_from)
            raise WorkerKilledError(death, where=str(folder / local.LOG_FILE), fix=f"The log ends with:\n{tail}")
        if status != 0 and explain_hang(RunDir(folder).stacks) is not None:
            raise errors.hang(RunDir(folder))
        self.raise_reported()
        if status != 0:
            tail = local.log_tail(folder, lines=8, begin=log_from)
            raise WorkerError(
                f"The worker processes exited with status {status}.",
                where=str(folder / local.LOG_FILE),
                fix=f"The log ends with:\n{tail}",
            )
