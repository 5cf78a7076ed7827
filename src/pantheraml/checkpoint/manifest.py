"""Checkpoint manifest: name, size and checksum of every file, written with them and verified before loading."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pantheraml.base.errors import DamagedCheckpointError

MANIFEST = "manifest.json"
VERSION = 1


def file_entries(files: Iterable[Path]) -> dict[str, Any]:
    """Return the manifest entries of `files`: name -> size and checksum."""
    return {path.name: {"bytes": path.stat().st_size, "blake2b": checksum(path)} for path in files}


def write_manifest(folder: Path, files: Mapping[str, Any]) -> None:
    """Write the manifest; `files` holds the `file_entries` of every file of the checkpoint."""
    entries = dict(sorted(files.items()))
    (folder / MANIFEST).write_text(json.dumps({"version": VERSION, "files": entries}, indent=1))


def checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def verify(folder: Path, *, rank: int = 0, world_size: int = 1) -> list[str]:
    """Return the checkpoint's file names; DamagedCheckpointError if one is missing or has the wrong size or checksum.

    Every rank checks all sizes, but only computes checksums for its share of the files: together they cover them all.
    """
    entries = _read_entries(folder)
    for number, (name, (size, expected)) in enumerate(entries.items()):
        path = folder / name
        try:
            if path.is_symlink() or not path.is_file():
                raise _damaged(folder, f"{name} is missing")
            if path.stat().st_size != size:
                raise _damaged(folder, f"{name} has {path.stat().st_size} bytes, not {size}")
            if number % world_size == rank and checksum(path) != expected:
                raise _damaged(folder, f"{name} fails its checksum")
        except OSError as err:
            raise _damaged(folder, f"{name} cannot be read ({err})") from err
    return list(entries)


def _read_entries(folder: Path) -> dict[str, tuple[int, str]]:
    """Return name -> size and checksum. The manifest itself may be damaged and still be valid JSON."""
    manifest = read_json(folder / MANIFEST)
    try:
        if manifest["version"] != VERSION:
            raise _damaged(folder, f"{MANIFEST} has version {manifest['version']!r}, not {VERSION}")
        files = {name: (known["bytes"], known["blake2b"]) for name, known in manifest["files"].items()}
        # a path or `..` would read files outside the checkpoint
        if any(Path(name).name != name for name in files):
            raise _damaged(folder, f"{MANIFEST} lists files outside of the checkpoint")
        return files
    except (KeyError, TypeError, AttributeError) as err:
        raise _damaged(folder, f"{MANIFEST} does not list the files") from err


def read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as err:
        raise _damaged(path.parent, f"{path.name} cannot be read ({err})") from err
    return content


def _damaged(folder: Path, reason: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"The checkpoint {folder.name} is damaged: {reason}.",
        where=str(folder),
        fix="Restore its files from a backup, or start a new run.",
    )
