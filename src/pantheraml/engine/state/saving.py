"""Background checkpoint saving, and loading the newest intact checkpoint.

Rank 0 writes, or every rank its own shards if the model is sharded. Results and failures of the writer thread are
reported by the main thread at the next `poll` or `finish`: as events, or as the error that ends the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from pantheraml.base.errors import CheckpointError, DamagedCheckpointError
from pantheraml.base.events import CheckpointRemoved, CheckpointSaved, Emit, WarningIssued
from pantheraml.checkpoint.host_copy import HostCopies
from pantheraml.checkpoint.sharded_files import Groups
from pantheraml.checkpoint.store import Checkpoint, CheckpointStore
from pantheraml.checkpoint.writer import CheckpointWriter, SavedCheckpoint
from pantheraml.checkpoint.writer_ranks import SINGLE_RANK, WriterRanks
from pantheraml.parallel.json_gather import all_gather_json
from pantheraml.parallel.process_group import LONG_TIMEOUT, World
from pantheraml.specs.train import CheckpointConfig

T = TypeVar("T")


@dataclass(frozen=True)
class _Started:
    stall_seconds: float
    best: bool


class Saver:
    """Context manager; on exit it waits for the last checkpoint and reports it."""

    def __init__(self, store: CheckpointStore, config: CheckpointConfig, world: World, emit: Emit) -> None:
        """A collective."""
        self._store, self._world, self._emit = store, world, emit
        self._writes = world.is_main or world.layout.dims.model_is_sharded
        self._writer = CheckpointWriter(store, keep=config.keep, ranks=_writer_ranks(world))
        self._started: _Started | None = None
        self.copies = HostCopies(world.device) if config.background else None
        """Host buffers for background saving; None: training waits for the disk, so nothing needs to be copied."""

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.finish()
        except CheckpointError as second:
            if err is None:
                raise
            self._emit(WarningIssued(message=f"additionally, a checkpoint was not saved: {second.what}"))
        finally:
            self._writer.close()

    def start(
        self, step: int, groups: Groups, state: Mapping[str, Any], *, best_step: int | None, begin: float
    ) -> None:
        """Start writing a checkpoint, after `finish`. `begin`: when training was paused for it; `best_step`: checkpoint
        not to be removed."""
        if self._writes:
            self._writer.start(step, groups, state, also_keep=set() if best_step is None else {best_step})
            written = self._writer.collect(wait=True) if self.copies is None else None
            self._started = _Started(stall_seconds=time.perf_counter() - begin, best=best_step == step)
            if written is not None:
                self._report(written)
        if self.copies is None:
            self._world.wait_for_main()

    def poll(self) -> None:
        """Report a checkpoint that has been written since, or raise the error of the writer."""
        self._collect(wait=False)

    def finish(self) -> None:
        """Wait for the checkpoint being written."""
        self._collect(wait=True)

    def _collect(self, *, wait: bool) -> None:
        written = self._writer.collect(wait=wait)
        if written is not None:
            self._report(written)

    def _report(self, written: SavedCheckpoint) -> None:
        assert self._started is not None, "no checkpoint was started"
        if written.lost:
            lost = ", ".join(map(str, written.lost))
            self._emit(WarningIssued(message=f"the checkpoints of step {lost} were removed while the run was active"))
        if written.failed_once is not None:
            self._emit(WarningIssued(message=f"{written.failed_once} A second attempt succeeded."))
        run_dir = self._store.root.parent
        self._emit(
            CheckpointSaved(
                step=written.step,
                path=str(written.path.relative_to(run_dir)),
                bytes=written.bytes,
                seconds=written.seconds,
                stall_seconds=self._started.stall_seconds,
                best=self._started.best,
            )
        )
        for step in written.removed:
            self._emit(CheckpointRemoved(step=step, path=str(self._store.path(step).relative_to(run_dir))))


def newest_intact(
    store: CheckpointStore, world: World, emit: Emit, *, eligible: Callable[[int], bool] = lambda step: True
) -> Checkpoint | None:
    """Return the newest intact checkpoint whose step is `eligible`; None if there are no checkpoints. A collective.

    Newer damaged ones are set aside, with a warning; if all are damaged, they are left in place.
    """
    damaged: dict[int, str] = {}
    for step in filter(eligible, reversed(_gather(store.steps(), world)[0])):
        checkpoint, problem = _try_load(store, step, world)
        if problem is None:
            if world.is_main:
                _set_aside(store, damaged, step, emit)
            return checkpoint
        damaged[step] = problem
    if damaged:
        raise DamagedCheckpointError(
            f"No checkpoint of this run is intact. {' '.join(damaged.values())}",
            where=str(store.root),
            fix="Restore the folder from a backup, or start over with `pantheraml train --overwrite`.",
        )
    return None


def load_intact(store: CheckpointStore, step: int, world: World) -> Checkpoint:
    """Load a checkpoint; DamagedCheckpointError on every rank if any rank found it damaged. A collective."""
    checkpoint, problem = _try_load(store, step, world)
    if checkpoint is None:
        assert problem is not None
        raise DamagedCheckpointError(problem, where=str(store.path(step)), fix="Use another checkpoint.")
    return checkpoint


def _try_load(store: CheckpointStore, step: int, world: World) -> tuple[Checkpoint | None, str | None]:
    """Return the checkpoint, or the problem that a rank found; each rank checks a share of the files."""
    loaded: Checkpoint | None = None
    problem: str | None = None
    try:
        loaded = store.load(step, rank=world.rank, world_size=world.size)
    except DamagedCheckpointError as err:
        problem = err.what
    problems = [reported for reported in _gather(problem, world) if reported is not None]
    return (None, problems[0]) if problems else (loaded, None)


def _set_aside(store: CheckpointStore, damaged: Mapping[int, str], used: int, emit: Emit) -> None:
    for step, problem in damaged.items():
        aside = store.set_aside(step)
        emit(
            WarningIssued(message=f"{problem} The run continues from step {used}; the damaged one is now {aside.name}.")
        )


def _gather(mine: T, world: World) -> list[T]:
    """Gather every rank's value, in rank order."""
    if world.size == 1:
        return [mine]
    return all_gather_json(mine, world.long_timeout_group)


def _writer_ranks(world: World) -> WriterRanks:
    """Ranks that write a checkpoint together. They communicate from threads, hence the separate process group."""
    if not world.layout.dims.model_is_sharded:
        return SINGLE_RANK
    group = dist.new_group(backend="gloo", timeout=LONG_TIMEOUT)

    def exchange(mine: Any) -> list[Any]:
        try:
            return all_gather_json(mine, group)
        except RuntimeError as err:
            raise CheckpointError(
                "A checkpoint was not saved: a rank that held a shard of it has exited.",
                fix="See worker.log for why it exited; `pantheraml resume` continues from the previous checkpoint.",
            ) from err

    return WriterRanks(world.rank, exchange, single=False)
