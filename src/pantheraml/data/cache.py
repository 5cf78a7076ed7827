"""The cache of prepared data: one folder per fingerprint, written aside and renamed when it is whole.

A lock per fingerprint makes a second run that wants the same data wait for the first instead of doing the work again;
the kernel drops it when its process ends. Others may write into a folder that people have named: a lock or data that
somebody else has put there is not used.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from pantheraml.base import env
from pantheraml.base.errors import StorageError
from pantheraml.base.events import Emit
from pantheraml.base.private import is_own, lock, open_private, private_folder

LOCK_SECONDS = 6 * 3600.0
"""How long another run may take to prepare the same data."""


def cache_folder(cache_dir: str | None) -> Path:
    return Path(cache_dir) if cache_dir else env.cache_root() / "data"


@contextlib.contextmanager
def locked(folder: Path, fingerprint: str, emit: Emit) -> Iterator[None]:
    """Hold the right to write the data of `fingerprint`."""
    try:
        # a folder that people named may hold other things, and is for whom they let in; what is made in it is not
        private_folder(folder, tighten=folder == cache_folder(None))
        path = folder / f"{fingerprint}.lock"
        held = open_private(path, os.O_RDWR | os.O_CREAT)
    except OSError as err:
        raise StorageError(
            f"The folder for prepared data cannot be written: {err.strerror}.",
            where=str(folder),
            todo="Name another folder with data.cache_dir or PANTHERAML_CACHE.",
        ) from err
    try:
        if not _is_trusted(folder, owner := os.fstat(held).st_uid):
            raise StorageError(
                f"The lock of the prepared data belongs to another user (uid {owner}), who could hold it for ever.",
                where=str(path),
                todo="Remove it, or name a folder of your own with data.cache_dir or PANTHERAML_CACHE.",
            )
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            emit("notice", message="another run is preparing the same data; waiting for it")
            lock(held, path, seconds=LOCK_SECONDS)
        yield
    finally:
        os.close(held)


def is_own_entry(target: Path, emit: Emit) -> bool:
    """Whether there is prepared data that this user (or root) has written, and that no link leads to."""
    try:
        found = [os.lstat(path) for path in (target, *target.iterdir())]
    except OSError:
        return False
    if not any(stat.S_ISLNK(one.st_mode) or not _is_trusted(target.parent, one.st_uid) for one in found):
        return True
    emit("warning", message=f"the cached data is a link, or of another user ({target}): it is prepared again")
    return False


def _is_trusted(folder: Path, owner: int) -> bool:
    return owner == 0 or is_own(folder, owner)
