"""Writing a folder whole or not at all: aside first, then renamed into place."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from pantheraml.base.errors import StorageError


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A new folder beside `path` to write to; it takes `path`'s place when the block ends well, else it vanishes."""
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    replaced = aside.with_suffix(".replaced")
    try:
        aside.mkdir(parents=True)
        yield aside
        for file in aside.rglob("*"):
            _flush(file)
        if path.exists():
            path.rename(replaced)
        aside.rename(path)
        _flush(path.parent)
    # safetensors reports a full disk as its own error
    except (OSError, SafetensorError) as err:
        if replaced.exists() and not path.exists():
            replaced.rename(path)
        raise StorageError(
            f"{path} could not be written: {err}.", todo="Free some disk space, or choose another folder."
        ) from err
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if path.exists():
            shutil.rmtree(replaced, ignore_errors=True)


def _flush(path: Path) -> None:
    """A rename may reach the disk before the bytes do, and a power cut between the two would leave empty files."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
