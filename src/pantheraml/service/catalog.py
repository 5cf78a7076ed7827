"""Base models that may be fine-tuned: folders below the models folder with a config and safetensors weights.

A request names a model; the name is looked up in this list and never made into a path. Links that lead out of the
models folder are left out.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_DEPTH = 3
_REFRESH_SECONDS = 2.0


@dataclass(frozen=True)
class BaseModelFolder:
    name: str
    path: Path
    created: int


class Catalog:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._models: dict[str, BaseModelFolder] = {}
        self._read_at = -_REFRESH_SECONDS

    def models(self) -> dict[str, BaseModelFolder]:
        """Model of each name, such as `llama-3.2-1b` or `meta/llama-3.2-1b`."""
        if time.monotonic() - self._read_at >= _REFRESH_SECONDS:
            self._models = {model.name: model for model in _find(self._root.resolve(), self._root.resolve(), 1)}
            self._read_at = time.monotonic()
        return self._models


def _find(folder: Path, root: Path, depth: int) -> list[BaseModelFolder]:
    found: list[BaseModelFolder] = []
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return []
    for entry in entries:
        path = Path(entry.path)
        if entry.name.startswith(".") or not entry.is_dir() or not path.resolve().is_relative_to(root):
            continue
        if (path / "config.json").is_file():
            if any(path.glob("*.safetensors")):
                name = path.relative_to(root).as_posix()
                found.append(BaseModelFolder(name, path, int((path / "config.json").stat().st_mtime)))
        elif depth < _DEPTH:
            found += _find(path, root, depth + 1)
    return found
