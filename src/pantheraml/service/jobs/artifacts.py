"""Files of a run folder that its user may download. A request's name is looked up here and never made into a path."""

from __future__ import annotations

from pathlib import Path

from pantheraml.service.jobs.merge import FOLDER as MERGED
from pantheraml.specs.run_dir import RunDir

_FILES = ("report.html", "run.json")
_FOLDERS = ("adapter", "model", MERGED)


def artifacts_of(run: RunDir) -> dict[str, Path]:
    """File of each name, such as `adapter/adapter_model.safetensors`. Symlinks are left out."""
    found = {name: run.path / name for name in _FILES}
    for folder in _FOLDERS:
        if (run.path / folder).is_dir():
            found |= {f"{folder}/{path.name}": path for path in sorted((run.path / folder).iterdir())}
    return {name: path for name, path in found.items() if path.is_file() and not path.is_symlink()}
