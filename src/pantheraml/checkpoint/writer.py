"""Writing checkpoints beside the training: a thread saves one and removes those that are no longer kept.

There is one at a time. What went wrong in the thread is raised by whoever asks for the result. Where several ranks
write one checkpoint, each has such a thread.
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
from pantheraml.checkpoint.parts import Groups
from pantheraml.checkpoint.peers import ALONE, Peers
from pantheraml.checkpoint.store import CheckpointStore


@dataclass(frozen=True)
class Written:
    """A checkpoint that is committed."""

    step: int
    path: Path
    bytes: int
    seconds: float
    removed: list[int]
    """Steps whose checkpoints made room for it."""
    lost: list[int]
    """Steps whose checkpoints somebody else removed since the last save."""
    failed_once: str | None
    """Why the first attempt failed; None: it did not."""


class CheckpointWriter:
    def __init__(self, store: CheckpointStore, *, keep: int, peers: Peers = ALONE) -> None:
        self._store, self._keep, self._peers = store, keep, peers
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[Written] | None = None
        self._known: set[int] = set()

    def start(self, step: int, groups: Groups, state: Mapping[str, Any], *, also_keep: set[int]) -> None:
        """Begin to write. The tensors must not change until the result was collected."""
        assert self._pending is None, "the one before was collected"
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending = self._thread.submit(self._write, step, groups, copy.deepcopy(dict(state)), also_keep)

    def collect(self, *, wait: bool) -> Written | None:
        """The result of `start`, once; None if there is none (yet, unless `wait`). Raises what the thread raised."""
        if self._pending is None or not (wait or self._pending.done()):
            return None
        pending, self._pending = self._pending, None
        return pending.result()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None

    def _write(self, step: int, groups: Groups, state: Mapping[str, Any], also_keep: set[int]) -> Written:
        begin = time.perf_counter()
        lost = sorted(self._known - set(self._store.steps()) - {step})
        path, failed_once = self._save(step, groups, state)
        removed = self._peers.all_do(lambda: self._make_room(also_keep))[0]
        self._known = set(self._store.steps())
        return Written(step, path, self._store.bytes(step), time.perf_counter() - begin, removed, lost, failed_once)

    def _save(self, step: int, groups: Groups, state: Mapping[str, Any]) -> tuple[Path, str | None]:
        """A second attempt helps if a disk was busy for a moment, or somebody removed the folder in mid-write."""
        failed_once = None
        while True:
            self._peers.all_do(lambda: self._check_place(step))
            try:
                return self._store.save(step, groups, state, peers=self._peers), failed_once
            except StorageError as err:  # the same on all peers
                if failed_once is not None:
                    raise
                failed_once = err.what

    def _make_room(self, also_keep: set[int]) -> list[int]:
        return self._store.prune(keep=self._keep, also=also_keep) if self._peers.is_main else []

    def _check_place(self, step: int) -> None:
        run_folder = self._store.root.parent
        if not run_folder.is_dir():
            # Making it anew would leave a run without configuration and events, or fill the disk below a lost mount.
            raise StorageError(
                f"The checkpoint of step {step} cannot be saved: the run folder is gone.",
                where=str(run_folder),
                todo="Bring it back (was a disk unmounted?) and resume, or start the run again.",
            )
