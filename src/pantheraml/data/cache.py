"""The cache of prepared data: one folder per fingerprint, written aside and renamed when it is whole.

A lock per fingerprint makes a second run that wants the same data wait for the first instead of doing the work again;
the kernel drops it when its process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from pantheraml.base import env
from pantheraml.base.errors import StorageError
from pantheraml.base.events import Emit
from pantheraml.base.private import open_private, private_folder


def cache_folder(cache_dir: str | None) -> Path:
    return Path(cache_dir) if cache_dir else env.cache_root() / "data"


@contextlib.contextmanager
def locked(folder: Path, fingerprint: str, emit: Emit) -> Iterator[None]:
    """Hold the right to write the data of `fingerprint`."""
    try:
        # a folder that people named may hold other things, and is for whom they let in; what is made in it is not
        private_folder(folder, tighten=folder == cache_folder(None))
        lock = open_private(folder / f"{fingerprint}.lock", os.O_RDWR | os.O_CREAT)
    except OSError as err:
        raise StorageError(
            f"The folder for prepared data cannot be written: {err.strerror}.",
            where=str(folder),
            todo="Name another folder with data.cache_dir or PANTHERAML_CACHE.",
        ) from err
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            emit("notice", message="another run is preparing the same data; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
