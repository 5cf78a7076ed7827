"""Folders and files private to this user.

Run folders and caches have mode 0700 and their files 0600, whatever the umask. Anyone who can open a file can hold a
lock on it, and anyone who can write to a folder can plant a symlink under a name that is written next. So folders of
other users are refused, writes do not follow symlinks, and locks have a timeout.
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
"""Lock timeout. Writing a line takes microseconds, so a lock held this long is stuck."""


def private_folder(path: Path, *, tighten: bool = True) -> None:
    """Create a folder with mode 0700. An existing one must belong to this user (else PermissionError); with `tighten`,
    access of others to it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.mkdir(path, FOLDER)
    except FileExistsError:
        mode = require_own_folder(path)
        if tighten and mode & 0o077:
            with contextlib.suppress(OSError):  # a file system without modes
                os.chmod(path, mode & FOLDER)


def require_own_folder(path: Path) -> int:
    """Return the mode of this user's folder; OSError if it belongs to another user, or is another user's symlink."""
    link = os.lstat(path)
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (0, os.geteuid()):
        message = f"it is a symlink of another user (uid {link.st_uid}), which is not followed"
        raise PermissionError(errno.EPERM, message)
    status = os.stat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it is not a folder")
    if not is_own(path, status.st_uid):
        message = f"it belongs to another user (uid {status.st_uid}), who could redirect writes with symlinks"
        raise PermissionError(errno.EPERM, message)
    return stat.S_IMODE(status.st_mode)


def is_own(path: Path, owner: int) -> bool:
    """Return True if `owner`, of the folder or of a file in it, is this process's user. Some file systems (NFS, FUSE)
    map uids, so the owner of a new file is compared."""
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


def is_trusted(folder: Path, owner: int) -> bool:
    """Return True if `owner`, of the folder or of a file in it, is this process's user or root."""
    return owner == 0 or is_own(folder, owner)


def open_private(path: Path, flags: int) -> int:
    """Open a regular file and remove access of others; OSError for a symlink or any other kind of file."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, FILE)
    except OSError as err:
        if err.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symlink, which is not followed") from err
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    if stat.S_IMODE(mode) & 0o077:
        with contextlib.suppress(OSError):  # another user's file, or a file system without modes
            os.fchmod(descriptor, stat.S_IMODE(mode) & FILE)
    return descriptor


def lock(descriptor: int, path: Path, *, seconds: float = LOCK_SECONDS) -> None:
    """Lock the file exclusively; StorageError if another process holds the lock for `seconds`."""
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
                    fix="Find that process (`lslocks`, or `fuser` with the file's name), stop it, and resume.",
                ) from err
        time.sleep(pause)
        pause = min(0.05, 2 * pause)


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Make files and folders created in the block private, including those that libraries create."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def refuse_links(folder: Path, names: tuple[str, ...]) -> None:
    """OSError if one of `names` in the folder, or anything below it, is a symlink."""
    for name in names:
        path = folder / name
        inside = (os.path.join(top, entry) for top, *entries in os.walk(path) for entry in (*entries[0], *entries[1]))
        for entry in (str(path), *inside):
            if os.path.islink(entry):
                raise OSError(errno.ELOOP, f"{os.path.relpath(entry, folder)} in it is a symlink")
