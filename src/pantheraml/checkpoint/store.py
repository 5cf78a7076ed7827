"""The checkpoints of a run: `checkpoints/step-00000100/` and so on, each whole and checksummed.

A checkpoint holds tensors in named groups (`weights`, `optimizer`, `rng`; one safetensors file each) and a plain JSON
state. What they mean is the engine's business. A folder of that name is a checkpoint that was committed; if its content
is not what was written, `load` says so, and `set_aside` takes it out of the list without losing it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from pantheraml.base.errors import StorageError
from pantheraml.base.folders import PARTIAL, committed_folder
from pantheraml.checkpoint.manifest import read_json, verify, write_manifest

STATE = "state.json"
NAME = re.compile(r"step-(\d{8})")
DAMAGED = "damaged-"

Tensors = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Checkpoint:
    step: int
    tensors: Tensors
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

    def save(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> Path:
        final = self.path(step)
        with committed_folder(final) as folder:
            for group, named in tensors.items():
                save_file(
                    {name: tensor.detach().contiguous() for name, tensor in named.items()},
                    folder / f"{group}.safetensors",
                )
            (folder / STATE).write_text(json.dumps(dict(state), indent=1))
            write_manifest(folder)
        return final

    def load(self, step: int) -> Checkpoint:
        """What was saved; DamagedCheckpointError if that is no longer what lies there."""
        folder = self.path(step)
        files = [folder / name for name in verify(folder)]
        tensors = {path.stem: load_file(path) for path in files if path.suffix == ".safetensors"}
        return Checkpoint(step=step, tensors=tensors, state=read_json(folder / STATE))

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
