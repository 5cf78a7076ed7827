"""Task `start`: prepare the data and train, in one process.

A run of one process is ready sooner so: a process that only prepares would first import the same libraries.
"""

from __future__ import annotations

from pathlib import Path

from pantheraml.base.events import EventWriter
from pantheraml.worker.prepare import prepare_task
from pantheraml.worker.train import train_task


def start_task(folder: Path, events: EventWriter) -> None:
    prepare_task(folder, events)
    train_task(folder, events)
