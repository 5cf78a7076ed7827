"""Observe a started job from outside: whether it runs, how it ended, its new events."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from pantheraml.base.event_stream import EventReader
from pantheraml.base.events import EventBase, TrainStarted, TrainStep
from pantheraml.runs.supervised import RunExit, SupervisedRun

MOST_EVENTS = 5000
"""Events read at once, so that a long stream, written while the service was down, does not fill memory."""


@dataclass(frozen=True)
class Observation:
    events: list[EventBase]
    offset: int
    exit: RunExit | None
    lost: bool
    """The supervisor is gone without having recorded how the run ended."""
    damaged_lines: int = 0
    """Lines among these events that cannot be read."""

    @property
    def training(self) -> bool:
        return any(isinstance(event, TrainStarted | TrainStep) for event in self.events)


def observe(folder: Path, job_id: str, token: int, offset: int) -> Observation:
    """Observe a job. Reads files and processes, so do not call it on the event loop."""
    run = SupervisedRun(folder / job_id, job_id)
    running = run.is_running(token)  # first: what it wrote before it ended is then read below
    ended = None if running else run.ending(token)
    reader = EventReader(run.run_dir.path, offset=offset)
    events = list(itertools.islice(reader.poll(), MOST_EVENTS))
    complete = len(events) < MOST_EVENTS
    lost = not running and ended is None and complete
    return Observation(events, reader.offset, ended if complete else None, lost, reader.damaged_lines)
