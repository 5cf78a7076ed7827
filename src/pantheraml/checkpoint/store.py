"""Checkpoint store: atomic, checksummed checkpoints of a run in `checkpoints/step-00000100/` and so on.

A checkpoint holds tensors in named groups (`weights`, `optimizer`, `rng`; one safetensors file each, or one per rank
when tensors are sharded) and a JSON state; the engine defines their meaning. A folder with such a name was committed as
a whole. If its content has changed since, `load` raises, and `set_aside` renames it without deleting anything.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pantheraml.base.errors import StorageError
from pantheraml.base.folders import PARTIAL, committed_folder, storage_errors, sync
from pantheraml.checkpoint.manifest import file_entries, read_json, verify, write_manifest
from pantheraml.checkpoint.sharded_files import Groups, SavedTensors, write_shards
from pantheraml.checkpoint.writer_ranks import SINGLE_RANK, WriterRanks

STATE = "state.json"
NAME = re.compile(r"step-(\d{8})")
DAMAGED = "damaged-"


@dataclass(frozen=True)
class Checkpoint:
    step: int
    tensors: SavedTensors
    state: dict[str, Any]


class CheckpointStore:
    """Saves, lists, loads and prunes the checkpoints below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps of all committed checkpoints, oldest first."""
        if not self.root.is_dir():
            return []
        names = (NAME.fullmatch(path.name) for path in self.root.iterdir())
        return sorted(int(match.group(1)) for match in names if match)

    def save(self, step: int, groups: Groups, state: Mapping[str, Any], *, ranks: WriterRanks = SINGLE_RANK) -> Path:
        """Save a checkpoint. A collective of `ranks`: each writes its own shards, and rank 0 writes `state`."""
        final = self.path(step)
        # a run folder that was moved away is not recreated (see `CheckpointWriter`)
        begin = committed_folder(final, make_parents=False, private=True)

        def write_own() -> dict[str, Any]:
            with storage_errors(final):
                files = write_shards(scratch, groups, rank=None if ranks.single else ranks.rank)
                for file in files:
                    sync(file)
                return file_entries(files)

        def commit(files: Mapping[str, Any]) -> None:
            with storage_errors(final):
                (scratch / STATE).write_text(json.dumps(dict(state), indent=1))
                write_manifest(scratch, {**files, **file_entries([scratch / STATE])})
            stack.close()

        with ExitStack() as stack:
            # rank 0 creates the scratch folder and broadcasts its name
            begun = ranks.run_all(lambda: str(stack.enter_context(begin)) if ranks.is_main else "")
            scratch = Path(begun[0])
            written = ranks.run_all(write_own)
            entries = {name: entry for files in written for name, entry in files.items()}
            ranks.run_all(lambda: commit(entries) if ranks.is_main else None)
        return final

    def load(self, step: int, *, rank: int = 0, world_size: int = 1) -> Checkpoint:
        """Open a checkpoint; DamagedCheckpointError if its files are not as they were written.

        Checksums are split over the ranks (see `verify`). Tensors are read on demand.
        """
        folder = self.path(step)
        files = verify(folder, rank=rank, world_size=world_size)
        return Checkpoint(step=step, tensors=SavedTensors(folder, files), state=read_json(folder / STATE))

    def set_aside(self, step: int) -> Path:
        """Rename a damaged checkpoint to `damaged-step-*`, so that it is no longer listed; its files are kept."""
        aside = self.root / f"{DAMAGED}{self.path(step).name}"
        try:
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(self.path(step), aside)
        except OSError as err:
            raise StorageError(
                f"The damaged checkpoint {self.path(step).name} cannot be renamed: {err.strerror}.",
                where=str(self.root),
                fix="Make the folder writable and resume.",
            ) from err
        return aside

    def bytes(self, step: int) -> int:
        return sum(path.stat().st_size for path in self.path(step).iterdir())

    def prune(self, *, keep: int, also: set[int]) -> list[int]:
        """Remove all but the `keep` newest checkpoints and those in `also`; return the removed steps."""
        removed = [step for step in self.steps()[:-keep] if step not in also]
        try:
            for step in removed:
                # Rename first, so that a half-removed checkpoint is never listed.
                os.rename(self.path(step), self.root / f"{PARTIAL}{self.path(step).name}")
            for leftover in self.root.glob(f"{PARTIAL}*"):
                shutil.rmtree(leftover)
        except OSError as err:
            raise StorageError(
                f"An old checkpoint cannot be removed: {err.strerror}.",
                where=str(self.root),
                fix="Make the folder writable, or raise checkpoint.keep; the newest checkpoint is intact.",
            ) from err
        return removed
