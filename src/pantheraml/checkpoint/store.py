"""The checkpoints of a run: `checkpoints/step-00000100/` and so on, each whole and checksummed.

A checkpoint holds tensors in named groups (`weights`, `optimizer`, `rng`; one safetensors file each) and a plain JSON
state. What they mean is the engine's business.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from pantheraml.base.folders import PARTIAL, committed_folder
from pantheraml.checkpoint.manifest import MANIFEST, read_json, verify, write_manifest

STATE = "state.json"
NAME = re.compile(r"step-(\d{8})")

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
        names = (NAME.fullmatch(path.name) for path in self.root.iterdir() if (path / MANIFEST).is_file())
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
        folder = self.path(step)
        verify(folder)
        tensors = {path.stem: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
        return Checkpoint(step=step, tensors=tensors, state=read_json(folder / STATE))

    def bytes(self, step: int) -> int:
        return sum(path.stat().st_size for path in self.path(step).iterdir())

    def prune(self, *, keep: int, also: set[int]) -> list[int]:
        """Remove all but the `keep` newest checkpoints and those in `also`; returns the steps removed."""
        for leftover in self.root.glob(f"{PARTIAL}*"):
            shutil.rmtree(leftover)
        removed = [step for step in self.steps()[:-keep] if step not in also]
        for step in removed:
            # The manifest goes first: a half-removed folder no longer counts as a checkpoint.
            (self.path(step) / MANIFEST).unlink()
            shutil.rmtree(self.path(step))
        return removed
