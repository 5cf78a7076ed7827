"""The cache of prepared data: one folder per fingerprint.

A folder is written under another name and renamed when it is whole. A lock per fingerprint makes a second run that
wants the same data wait for the first instead of doing the work again; the kernel drops it when its process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from pantheraml.base import env
from pantheraml.base.errors import StorageError
from pantheraml.base.events import Emit


def cache_folder(cache_dir: str | None) -> Path:
    return Path(cache_dir) if cache_dir else env.cache_root() / "data"


@contextlib.contextmanager
def locked(folder: Path, fingerprint: str, emit: Emit) -> Iterator[None]:
    """Hold the right to write the data of `fingerprint`."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / f"{fingerprint}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            emit("notice", message="another run is preparing the same data; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def replacing(final: Path) -> Iterator[Path]:
    """A path to write the folder `final` under; it takes its place if the block ends well, and goes away otherwise."""
    partial = final.with_name(f"{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed
    try:
        yield partial
        if final.exists():
            shutil.rmtree(final)  # found damaged, else it would have been used
        partial.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Trouble with the disk, in plain words."""
    try:
        yield
    except OSError as err:
        raise StorageError(
            f"The prepared data cannot be stored: {err.strerror or err}.",
            where=str(folder),
            todo="Make room there, or name another folder with data.cache_dir or PANTHERAML_CACHE.",
        ) from err
