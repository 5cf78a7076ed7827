"""The checkpoints of a run: `checkpoints/step-00000100/` and so on, each whole and checksummed.

A checkpoint holds tensors in named groups (`weights`, `optimizer`, `rng`; one safetensors file each, or one of each
rank where tensors are spread over ranks) and a plain JSON state. What they mean is the engine's business. A folder of
that name is a checkpoint that was committed; if its content is not what was written, `load` says so, and `set_aside`
takes it out of the list without losing it.
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
from pantheraml.checkpoint.manifest import facts, read_json, verify, write_manifest
from pantheraml.checkpoint.parts import Groups, SavedTensors, write_parts
from pantheraml.checkpoint.peers import ALONE, Peers

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

    def save(self, step: int, groups: Groups, state: Mapping[str, Any], *, peers: Peers = ALONE) -> Path:
        """Written by all `peers` together, each with its own tensors; `state` is the first one's."""
        final = self.path(step)
        # a run folder that somebody moved away is not made anew (see `CheckpointWriter`)
        begin = committed_folder(final, make_parents=False, private=True)

        def write_own() -> dict[str, Any]:
            with storage_errors(final):
                files = write_parts(scratch, groups, rank=None if peers.alone else peers.rank)
                for file in files:
                    sync(file)
                return facts(files)

        def commit(files: Mapping[str, Any]) -> None:
            with storage_errors(final):
                (scratch / STATE).write_text(json.dumps(dict(state), indent=1))
                write_manifest(scratch, {**files, **facts([scratch / STATE])})
            stack.close()

        with ExitStack() as stack:
            # only the first rank knows what it called the folder
            begun = peers.all_do(lambda: str(stack.enter_context(begin)) if peers.is_main else "")
            scratch = Path(begun[0])
            found = peers.all_do(write_own)
            everything = {name: known for files in found for name, known in files.items()}
            peers.all_do(lambda: commit(everything) if peers.is_main else None)
        return final

    def load(self, step: int, *, share: int = 0, shares: int = 1) -> Checkpoint:
        """What was saved; DamagedCheckpointError if that is no longer what lies there.

        Of `shares` that ranks check together this one checks the given `share`; the tensors are read when asked for.
        """
        folder = self.path(step)
        files = verify(folder, share=share, shares=shares)
        return Checkpoint(step=step, tensors=SavedTensors(folder, files), state=read_json(folder / STATE))

    def set_aside(self, step: int) -> Path:
        """Take a damaged checkpoint out of the list; its files stay, under a name that says what they are."""
        aside = self.root / f"{DAMAGED}{self.path(step).name}"
        try:
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(self.path(step), aside)
        except OSError as err:
            raise StorageError(
                f"The damaged checkpoint {self.path(step).name} cannot be renamed: {err.strerror}.",
                where=str(self.root),
                todo="Make the folder writable and resume.",
            ) from err
        return aside

    def bytes(self, step: int) -> int:
        return sum(path.stat().st_size for path in self.path(step).iterdir())

    def prune(self, *, keep: int, also: set[int]) -> list[int]:
        """Remove all but the `keep` newest checkpoints and those in `also`; returns the steps removed."""
        removed = [step for step in self.steps()[:-keep] if step not in also]
        try:
            for step in removed:
                # Renamed first: one that is half removed no longer counts as a checkpoint.
                os.rename(self.path(step), self.root / f"{PARTIAL}{self.path(step).name}")
            for leftover in self.root.glob(f"{PARTIAL}*"):
                shutil.rmtree(leftover)
        except OSError as err:
            raise StorageError(
                f"An old checkpoint cannot be removed: {err.strerror}.",
                where=str(self.root),
                todo="Make the folder writable, or raise checkpoint.keep; the newest checkpoint is whole.",
            ) from err
        return removed
