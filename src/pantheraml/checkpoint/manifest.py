"""The list of a checkpoint's files with size and checksum, written with them and checked before they are used."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pantheraml.base.errors import DamagedCheckpointError

MANIFEST = "manifest.json"
VERSION = 1


def write_manifest(folder: Path) -> None:
    files = {path.name: {"bytes": path.stat().st_size, "blake2b": checksum(path)} for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps({"version": VERSION, "files": files}, indent=1))


def checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def verify(folder: Path) -> list[str]:
    """The names of the checkpoint's files; DamagedCheckpointError unless each is there with its size and checksum."""
    listed = _listed(folder)
    for name, (size, expected) in listed.items():
        path = folder / name
        try:
            if not path.is_file():
                raise _damaged(folder, f"{name} is missing")
            if path.stat().st_size != size:
                raise _damaged(folder, f"{name} has {path.stat().st_size} bytes, not {size}")
            if checksum(path) != expected:
                raise _damaged(folder, f"{name} has another checksum than when it was written")
        except OSError as err:
            raise _damaged(folder, f"{name} cannot be read ({err})") from err
    return list(listed)


def _listed(folder: Path) -> dict[str, tuple[int, str]]:
    """Name -> bytes and checksum. The manifest itself may be what is damaged, and still be JSON."""
    manifest = read_json(folder / MANIFEST)
    try:
        if manifest["version"] != VERSION:
            raise _damaged(folder, f"{MANIFEST} has version {manifest['version']!r}, not {VERSION}")
        return {name: (facts["bytes"], facts["blake2b"]) for name, facts in manifest["files"].items()}
    except (KeyError, TypeError, AttributeError) as err:
        raise _damaged(folder, f"{MANIFEST} does not list the files") from err


def read_json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise _damaged(path.parent, f"{path.name} cannot be read ({err})") from err
    return found


def _damaged(folder: Path, why: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"The checkpoint {folder.name} is damaged: {why}.",
        where=str(folder),
        todo="Put back its files from a copy, or start a new run.",
    )
