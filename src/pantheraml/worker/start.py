"""Task `start`: prepare the data and train, in the same processes.

A run is ready sooner so: a process that only prepares would first import the same libraries. Of several ranks the first
prepares, for all of them.
"""

from __future__ import annotations

from pathlib import Path

from pantheraml.base import env
from pantheraml.base.events import EventWriter
from pantheraml.parallel.process_group import PATIENCE
from pantheraml.parallel.rendezvous import meet
from pantheraml.specs.run_dir import RunDir
from pantheraml.worker.prepare import prepare_task
from pantheraml.worker.train import train_task


def start_task(folder: Path, events: EventWriter) -> None:
    if env.process_rank().world_size == 1:
        prepare_task(folder, events)
    else:
        _prepare_on_rank_0(folder, events)
    train_task(folder, events)


def _prepare_on_rank_0(folder: Path, events: EventWriter) -> None:
    """The others wait for it on the store, which nobody looks at a clock for; if it fails, the agent ends them."""
    place, parallel = env.process_rank(), RunDir(folder).config().parallel
    store = meet(place, env.store_address(), timeout_seconds=parallel.timeout_seconds, max_retries=parallel.max_retries)
    if place.rank == 0:
        prepare_task(folder, events)
        store.set("prepared", "")
    else:
        store.wait(["prepared"], PATIENCE)
