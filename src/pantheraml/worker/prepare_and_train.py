"""Task `prepare_and_train`: prepare the data and train, in the same processes.

This starts faster: a separate process for the data would import the same libraries first. Rank 0 prepares the data for
all ranks.
"""

from __future__ import annotations

from pathlib import Path

from pantheraml.base import env
from pantheraml.base.event_stream import EventWriter
from pantheraml.parallel.process_group import LONG_TIMEOUT
from pantheraml.rendezvous.join_store import join_store
from pantheraml.specs.run_dir import RunDir
from pantheraml.worker.prepare import prepare_task
from pantheraml.worker.train import train_task


def prepare_and_train_task(folder: Path, events: EventWriter) -> None:
    if env.process_rank().world_size == 1:
        prepare_task(folder, events)
    else:
        _prepare_on_rank_0(folder, events)
    train_task(folder, events)


def _prepare_on_rank_0(folder: Path, events: EventWriter) -> None:
    """Other ranks wait on the store, with the long timeout; if rank 0 fails, the agent ends them."""
    process, parallel = env.process_rank(), RunDir(folder).config().parallel
    store = join_store(
        process, env.store_address(), timeout_seconds=parallel.timeout_seconds, max_retries=parallel.max_retries
    )
    if process.rank == 0:
        prepare_task(folder, events)
        store.set("prepared", "")
    else:
        store.wait(["prepared"], LONG_TIMEOUT)
