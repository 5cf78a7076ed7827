"""Folders and files that belong to this user alone.

Run folders and caches are for their owner: 0700, and files in them 0600, whatever the umask. Who can open a file can
hold a lock on it, and who can write to a folder can put a link there under a name that is written to next. So a folder
of another user is not used, links are not followed where something is written, and no lock is awaited for ever.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from pantheraml.base.errors import StorageError

FOLDER, FILE = 0o700, 0o600
LOCK_SECONDS = 30.0
"""A line is written in microseconds; who holds the lock for so long is not about to give it back."""


def private_folder(path: Path, *, tighten: bool = True) -> None:
    """Make the folder, for this user alone. One that is there must be this user's (else PermissionError); with
    `tighten` nobody else may enter it from now on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.mkdir(path, FOLDER)
    except FileExistsError:
        mode = require_own_folder(path)
        if tighten and mode & 0o077:
            with contextlib.suppress(OSError):  # a file system without such modes
                os.chmod(path, mode & FOLDER)


def require_own_folder(path: Path) -> int:
    """The mode of a folder of this user; OSError if it is another's, or reached by a link of another."""
    link = os.lstat(path)
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (0, os.geteuid()):
        told = f"it is a link of another user (uid {link.st_uid}), which is not followed"
        raise PermissionError(errno.EPERM, told)
    known = os.stat(path)
    if not stat.S_ISDIR(known.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it is not a folder")
    if not is_own(path, known.st_uid):
        told = f"it belongs to another user (uid {known.st_uid}), who could make it write elsewhere"
        raise PermissionError(errno.EPERM, told)
    return stat.S_IMODE(known.st_mode)


def is_own(path: Path, owner: int) -> bool:
    """Whether `owner`, of the folder or of something in it, is who this process is there. Some file systems (NFS, FUSE)
    have other numbers for users; what a new file gets tells which."""
    if owner == os.geteuid():
        return True
    probe = path / f".probe-{secrets.token_hex(8)}"
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, FILE)
    except OSError:
        return False
    try:
        return os.fstat(descriptor).st_uid == owner
    finally:
        os.close(descriptor)
        os.unlink(probe)


def open_private(path: Path, flags: int) -> int:
    """A descriptor of a plain file that nobody else may open from now on; OSError for a link or anything else."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, FILE)
    except OSError as err:
        if err.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, which is not followed") from err
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a plain file")
    if stat.S_IMODE(mode) & 0o077:
        with contextlib.suppress(OSError):  # not ours, or a file system without such modes
            os.fchmod(descriptor, stat.S_IMODE(mode) & FILE)
    return descriptor


def lock(descriptor: int, path: Path, *, seconds: float = LOCK_SECONDS) -> None:
    """Hold the file alone; StorageError if somebody else does for too long."""
    deadline, pause = None, 0.001
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as err:
            now = time.monotonic()
            deadline = deadline or now + seconds
            if now >= deadline:
                raise StorageError(
                    f"Another process has held the lock of {path.name} for {seconds:.0f} s.",
                    where=str(path),
                    todo="Find out which (`lslocks`, or `fuser` with the file's name), end it, and resume.",
                ) from err
        time.sleep(pause)
        pause = min(0.05, 2 * pause)


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Files and folders that this process makes meanwhile, libraries included, are for this user alone."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def refuse_links(folder: Path, names: tuple[str, ...]) -> None:
    """OSError if one of `names` in the folder, or something below it, is a link."""
    for name in names:
        path = folder / name
        inside = (os.path.join(top, entry) for top, *entries in os.walk(path) for entry in (*entries[0], *entries[1]))
        for found in (str(path), *inside):
            if os.path.islink(found):
                raise OSError(errno.ELOOP, f"{os.path.relpath(found, folder)} in it is a link")
