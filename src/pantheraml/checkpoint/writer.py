"""Asynchronous checkpoint writer: a thread saves a checkpoint and prunes old ones while training continues.

At most one save is in flight. An exception in the thread is raised by `collect`. When several ranks write one sharded
checkpoint, each has its own thread.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pantheraml.base.errors import StorageError
from pantheraml.checkpoint.sharded_files import Groups
from pantheraml.checkpoint.store import CheckpointStore
from pantheraml.checkpoint.writer_ranks import SINGLE_RANK, WriterRanks


@dataclass(frozen=True)
class SavedCheckpoint:
    """A committed checkpoint."""

    step: int
    path: Path
    bytes: int
    seconds: float
    removed: list[int]
    """Steps of the checkpoints pruned after it."""
    lost: list[int]
    """Steps of checkpoints that something else removed since the last save."""
    failed_once: str | None
    """Error of the first attempt, or None if it succeeded."""


class CheckpointWriter:
    def __init__(self, store: CheckpointStore, *, keep: int, ranks: WriterRanks = SINGLE_RANK) -> None:
        self._store, self._keep, self._ranks = store, keep, ranks
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[SavedCheckpoint] | None = None
        self._known: set[int] = set()

    def start(self, step: int, groups: Groups, state: Mapping[str, Any], *, also_keep: set[int]) -> None:
        """Start a save. The tensors must not change until its result is collected."""
        assert self._pending is None, "the previous save was collected"
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending = self._thread.submit(self._write, step, groups, copy.deepcopy(dict(state)), also_keep)

    def collect(self, *, wait: bool) -> SavedCheckpoint | None:
        """Return the result of `start` once, or None if no save is pending or (without `wait`) it is not done yet.

        Raises what the thread raised.
        """
        if self._pending is None or not (wait or self._pending.done()):
            return None
        pending, self._pending = self._pending, None
        return pending.result()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None

    def _write(self, step: int, groups: Groups, state: Mapping[str, Any], also_keep: set[int]) -> SavedCheckpoint:
        begin = time.perf_counter()
        lost = sorted(self._known - set(self._store.steps()) - {step})
        path, failed_once = self._save(step, groups, state)
        removed = self._ranks.run_all(lambda: self._prune(also_keep))[0]
        self._known = set(self._store.steps())
        return SavedCheckpoint(
            step, path, self._store.bytes(step), time.perf_counter() - begin, removed, lost, failed_once
        )

    def _save(self, step: int, groups: Groups, state: Mapping[str, Any]) -> tuple[Path, str | None]:
        """Save, with one retry: it helps if the disk was briefly busy or the folder was removed during the write."""
        failed_once = None
        while True:
            self._ranks.run_all(lambda: self._check_run_folder(step))
            try:
                return self._store.save(step, groups, state, ranks=self._ranks), failed_once
            except StorageError as err:  # raised on all ranks alike
                if failed_once is not None:
                    raise
                failed_once = err.what

    def _prune(self, also_keep: set[int]) -> list[int]:
        return self._store.prune(keep=self._keep, also=also_keep) if self._ranks.is_main else []

    def _check_run_folder(self, step: int) -> None:
        run_folder = self._store.root.parent
        if not run_folder.is_dir():
            # Recreating it would leave a run without config and events, or fill the disk below a lost mount.
            raise StorageError(
                f"The checkpoint of step {step} cannot be saved: the run folder is gone.",
                where=str(run_folder),
                fix="Restore it (was a disk unmounted?) and resume, or start a new run.",
            )
