"""The list of a checkpoint's files with size and checksum, written with them and checked before they are used."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pantheraml.base.errors import CheckpointError

MANIFEST = "manifest.json"


def write_manifest(folder: Path) -> None:
    files = {path.name: {"bytes": path.stat().st_size, "blake2b": checksum(path)} for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps({"version": 1, "files": files}, indent=1))


def checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def verify(folder: Path) -> None:
    """Raise unless every file of the manifest is there with its size and checksum."""
    manifest = read_json(folder / MANIFEST)
    for name, facts in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise _damaged(folder, f"{name} is missing")
        if path.stat().st_size != facts["bytes"]:
            raise _damaged(folder, f"{name} has {path.stat().st_size} bytes, not {facts['bytes']}")
        if checksum(path) != facts["blake2b"]:
            raise _damaged(folder, f"{name} has another checksum than when it was written")


def read_json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as err:
        raise _damaged(path.parent, f"{path.name} cannot be read ({err})") from err
    return found


def _damaged(folder: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {folder.name} is damaged: {why}.",
        where=str(folder),
        todo="Remove that folder and resume; the run continues from the checkpoint before it.",
    )
