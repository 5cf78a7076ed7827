"""The list of a checkpoint's files with size and checksum, written with them and checked before they are used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pantheraml.base.errors import DamagedCheckpointError

MANIFEST = "manifest.json"
VERSION = 1


def facts(files: Iterable[Path]) -> dict[str, Any]:
    """What a manifest says of files: name -> size and checksum."""
    return {path.name: {"bytes": path.stat().st_size, "blake2b": checksum(path)} for path in files}


def write_manifest(folder: Path, files: Mapping[str, Any]) -> None:
    """`files`: the `facts` of all files of the checkpoint."""
    listed = dict(sorted(files.items()))
    (folder / MANIFEST).write_text(json.dumps({"version": VERSION, "files": listed}, indent=1))


def checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def verify(folder: Path, *, share: int = 0, shares: int = 1) -> list[str]:
    """The names of the checkpoint's files; DamagedCheckpointError unless each is there with its size and checksum.

    Ranks that check together read a share of the files each; the checksums of the others are left to their readers.
    """
    listed = _listed(folder)
    for number, (name, (size, expected)) in enumerate(listed.items()):
        path = folder / name
        try:
            if path.is_symlink() or not path.is_file():
                raise _damaged(folder, f"{name} is missing")
            if path.stat().st_size != size:
                raise _damaged(folder, f"{name} has {path.stat().st_size} bytes, not {size}")
            if number % shares == share and checksum(path) != expected:
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
        files = {name: (known["bytes"], known["blake2b"]) for name, known in manifest["files"].items()}
        # as an odd name, or as `..`, it would be a file of somebody else that is read
        if any(Path(name).name != name for name in files):
            raise _damaged(folder, f"{MANIFEST} names files that are not its own")
        return files
    except (KeyError, TypeError, AttributeError) as err:
        raise _damaged(folder, f"{MANIFEST} does not list the files") from err


def read_json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as err:
        raise _damaged(path.parent, f"{path.name} cannot be read ({err})") from err
    return found


def _damaged(folder: Path, why: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"The checkpoint {folder.name} is damaged: {why}.",
        where=str(folder),
        todo="Put back its files from a copy, or start a new run.",
    )
