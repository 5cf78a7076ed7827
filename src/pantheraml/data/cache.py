"""Cache of prepared data: one folder per fingerprint, written to a temporary folder and renamed when complete.

A file lock per fingerprint makes a second run that needs the same data wait for the first instead of repeating the
work; the kernel releases it when the process exits. Other users may write to a data.cache_dir: locks and data that they
put there are not used.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from pantheraml.base import env
from pantheraml.base.errors import StorageError
from pantheraml.base.events import Emit, Notice
from pantheraml.base.private import is_trusted, lock, open_private, private_folder

LOCK_SECONDS = 6 * 3600.0
"""Maximum time to wait for another run that prepares the same data."""


def cache_folder(cache_dir: str | None) -> Path:
    return Path(cache_dir) if cache_dir else env.cache_root() / "data"


@contextlib.contextmanager
def fingerprint_lock(folder: Path, fingerprint: str, emit: Emit) -> Iterator[None]:
    """Hold the exclusive lock on the data of `fingerprint`."""
    try:
        # a user's own data.cache_dir may hold other files: keep its mode; only what is created inside is private
        private_folder(folder, tighten=folder == cache_folder(None))
        path = folder / f"{fingerprint}.lock"
        held = open_private(path, os.O_RDWR | os.O_CREAT)
    except OSError as err:
        raise StorageError(
            f"The cache folder for prepared data cannot be written: {err.strerror}.",
            where=str(folder),
            fix="Choose another folder with data.cache_dir or PANTHERAML_CACHE.",
        ) from err
    try:
        if not is_trusted(folder, owner := os.fstat(held).st_uid):
            raise StorageError(
                f"The lock file of the prepared data belongs to another user (uid {owner}), who could hold it forever.",
                where=str(path),
                fix="Remove it, or choose a folder of your own with data.cache_dir or PANTHERAML_CACHE.",
            )
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            emit(Notice(message="another run is preparing the same data; waiting for it"))
            lock(held, path, seconds=LOCK_SECONDS)
        yield
    finally:
        os.close(held)
