"""Saving a run's checkpoints while it goes on, and finding the newest whole one again.

The main rank writes, or where the model is spread over ranks each rank its own part. What a thread has done, or failed
to do, is told by the main thread at the next `poll` or `finish`: as events, or as the error that ends the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from pantheraml.base.errors import CheckpointError, DamagedCheckpointError
from pantheraml.base.events import Emit
from pantheraml.checkpoint.host_copy import HostCopies
from pantheraml.checkpoint.parts import Groups
from pantheraml.checkpoint.peers import ALONE, Peers
from pantheraml.checkpoint.store import Checkpoint, CheckpointStore
from pantheraml.checkpoint.writer import CheckpointWriter, Written
from pantheraml.parallel.exchange import all_gather_json
from pantheraml.parallel.process_group import PATIENCE, World
from pantheraml.specs.train import CheckpointConfig

T = TypeVar("T")


@dataclass(frozen=True)
class _Started:
    stall_seconds: float
    best: bool


class Saver:
    """A context: on leaving it, the last checkpoint is written, and told of."""

    def __init__(self, store: CheckpointStore, config: CheckpointConfig, world: World, emit: Emit) -> None:
        """A collective."""
        self._store, self._world, self._emit = store, world, emit
        self._writes = world.is_main or world.layout.dims.model_copies_apart
        self._writer = CheckpointWriter(store, keep=config.keep, peers=_peers(world))
        self._started: _Started | None = None
        self.copies = HostCopies(world.device) if config.background else None
        """Where to put what is to be saved; None: training waits for the disk, and what it has need not be copied."""

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.finish()
        except CheckpointError as second:
            if err is None:
                raise
            self._emit("warning", message=f"besides, a checkpoint was not saved: {second.what}")
        finally:
            self._writer.close()

    def start(
        self, step: int, groups: Groups, state: Mapping[str, Any], *, best_step: int | None, begin: float
    ) -> None:
        """Write a checkpoint, after `finish`. Training has waited for it since `begin`; that of `best_step` is kept."""
        if self._writes:
            self._writer.start(step, groups, state, also_keep=set() if best_step is None else {best_step})
            written = self._writer.collect(wait=True) if self.copies is None else None
            self._started = _Started(stall_seconds=time.perf_counter() - begin, best=best_step == step)
            if written is not None:
                self._tell(written)
        if self.copies is None:
            self._world.wait_for_main()

    def poll(self) -> None:
        """Tell of a checkpoint that was written meanwhile, or raise why it could not be."""
        self._collect(wait=False)

    def finish(self) -> None:
        """Wait for the checkpoint that is being written."""
        self._collect(wait=True)

    def _collect(self, *, wait: bool) -> None:
        written = self._writer.collect(wait=wait)
        if written is not None:
            self._tell(written)

    def _tell(self, written: Written) -> None:
        assert self._started is not None, "somebody started it"
        if written.lost:
            lost = ", ".join(map(str, written.lost))
            self._emit("warning", message=f"the checkpoints of step {lost} were removed while the run was at work")
        if written.failed_once is not None:
            self._emit("warning", message=f"{written.failed_once} A second attempt succeeded.")
        run_dir = self._store.root.parent
        self._emit(
            "checkpoint.saved",
            step=written.step,
            path=str(written.path.relative_to(run_dir)),
            bytes=written.bytes,
            seconds=written.seconds,
            stall_seconds=self._started.stall_seconds,
            best=self._started.best,
        )
        for step in written.removed:
            self._emit("checkpoint.removed", step=step, path=str(self._store.path(step).relative_to(run_dir)))


def newest_whole(
    store: CheckpointStore, world: World, emit: Emit, *, eligible: Callable[[int], bool] = lambda step: True
) -> Checkpoint | None:
    """The newest checkpoint, of those whose step is `eligible`, that every rank reads as it was written; None if there
    is none at all.

    A collective. Damaged ones that are newer are set aside, with a warning; if all are damaged, they stay as they are.
    """
    damaged: dict[int, str] = {}
    for step in filter(eligible, reversed(_everyone(store.steps(), world)[0])):
        checkpoint, problem = _attempt(store, step, world)
        if problem is None:
            if world.is_main:
                _set_aside(store, damaged, step, emit)
            return checkpoint
        damaged[step] = problem
    if damaged:
        raise DamagedCheckpointError(
            f"No checkpoint of this run is whole. {' '.join(damaged.values())}",
            where=str(store.root),
            todo="Put the folder back from a copy, or start again with `pantheraml train --overwrite`.",
        )
    return None


def load_whole(store: CheckpointStore, step: int, world: World) -> Checkpoint:
    """A collective: the checkpoint, or DamagedCheckpointError on every rank if one of them found it damaged."""
    checkpoint, problem = _attempt(store, step, world)
    if checkpoint is None:
        assert problem is not None
        raise DamagedCheckpointError(problem, where=str(store.path(step)))
    return checkpoint


def _attempt(store: CheckpointStore, step: int, world: World) -> tuple[Checkpoint | None, str | None]:
    """The checkpoint, or what a rank has found to be wrong with it; each checks a share of its files."""
    found: Checkpoint | None = None
    problem: str | None = None
    try:
        found = store.load(step, share=world.rank, shares=world.size)
    except DamagedCheckpointError as err:
        problem = err.what
    problems = [known for known in _everyone(problem, world) if known is not None]
    return (None, problems[0]) if problems else (found, None)


def _set_aside(store: CheckpointStore, damaged: Mapping[int, str], used: int, emit: Emit) -> None:
    for step, problem in damaged.items():
        aside = store.set_aside(step)
        emit("warning", message=f"{problem} The run continues from step {used}; the damaged one is now {aside.name}.")


def _everyone(mine: T, world: World) -> list[T]:
    """Every rank's value, by rank."""
    if world.size == 1:
        return [mine]
    return all_gather_json(mine, world.patient_group)


def _peers(world: World) -> Peers:
    """Who writes a checkpoint together with this rank. They talk in threads, and so through a group of their own."""
    if not world.layout.dims.model_copies_apart:
        return ALONE
    group = dist.new_group(backend="gloo", timeout=PATIENCE)

    def exchange(mine: Any) -> list[Any]:
        try:
            return all_gather_json(mine, group)
        except RuntimeError as err:
            raise CheckpointError(
                "A checkpoint was not saved: a process that had a part of it is gone.",
                todo="See worker.log for why it ended; `pantheraml resume` continues from the checkpoint before.",
            ) from err

    return Peers(world.rank, exchange, alone=False)
