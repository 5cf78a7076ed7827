"""Atomic writes of folders and files.

A folder is written to a scratch folder next to it, fsynced and renamed. A crash or a full disk leaves at most a
`.partial-*` folder, which the next save of the same name removes; the previous content stays intact. Scratch names are
random, so that other users cannot plant a symlink there.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from pantheraml.base.errors import PantheraError, RunDirectoryError, StorageError
from pantheraml.base.private import FILE, FOLDER, is_own
from pantheraml.base.roots import require_allowed

PARTIAL = ".partial-"


@contextmanager
def committed_folder(final: Path, *, make_parents: bool = True, private: bool = False) -> Iterator[Path]:
    """Yield a scratch folder; if the block ends without error, it replaces `final`.

    Without `make_parents` only the direct parent is created, and a missing folder above it is an error. A `private`
    folder is readable by this user only; otherwise the umask applies.
    """
    scratch = _scratch(final)
    try:
        with storage_errors(final):
            final.parent.mkdir(parents=make_parents, exist_ok=True)
            _recover(final)
            for leftover in _leftovers(final):
                shutil.rmtree(leftover)  # not ignore_errors: the reason belongs in the error message
            scratch.mkdir(FOLDER if private else 0o777)
            yield scratch
            if not private:
                _apply_umask(scratch)
            for path in [*scratch.rglob("*"), scratch]:
                sync(path)
            _replace(scratch, final)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


@contextmanager
def added_files(final: Path, *, replaces: Sequence[str] = (), name: str = "files") -> Iterator[Path]:
    """Yield a scratch folder; if the block ends without error, its files move into `final`, beside what is there.

    The scratch folder, for `name`, is inside `final`, which may be where a disk is mounted. Files in `final` that match
    a pattern of `replaces` are of an earlier save, and go.
    """
    scratch = _scratch(final / name)
    try:
        with storage_errors(final):
            final.mkdir(parents=True, exist_ok=True)
            scratch.mkdir()
            yield scratch
            _apply_umask(scratch)
            new = [path for path in scratch.rglob("*") if path.is_file()]
            for path in new:
                sync(path)
            for old in {path for pattern in replaces for path in final.glob(pattern) if path.is_file()}:
                old.unlink()
            for path in new:
                target = final / path.relative_to(scratch)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)
            sync(final)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _apply_umask(folder: Path) -> None:
    """Set file modes by the umask: safetensors writes files with mode 0600, whatever the umask."""
    umask = os.umask(0o077)  # the umask can only be read by setting it
    os.umask(umask)
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            os.chmod(path, 0o666 & ~umask)


def require_empty(output: Path) -> None:
    """RunDirectoryError unless the output folder of a model is new or empty."""
    require_allowed(output, key="--output")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise RunDirectoryError(f"{output} is not an empty folder.", fix="Choose another --output.")


@contextmanager
def no_scratch_left(final: Path) -> Iterator[None]:
    """If the block fails, remove scratch folders that another process (a killed worker) left for `final`."""
    try:
        yield
    except BaseException:
        for leftover in _leftovers(final):
            shutil.rmtree(leftover, ignore_errors=True)
        raise


@contextmanager
def working_folder(purpose: str) -> Iterator[Path]:
    """Yield a new private folder among the temporary files, which is removed unless an error points into it."""
    folder = Path(tempfile.mkdtemp(prefix=f"pantheraml-{purpose}-"))
    try:
        yield folder
    except PantheraError as err:
        if not str(err.where).startswith(str(folder)):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _scratch(final: Path) -> Path:
    return final.with_name(f"{PARTIAL}{final.name}.{secrets.token_hex(8)}")


def _leftovers(final: Path) -> list[Path]:
    """Scratch folders of `final` that this user's earlier writers left."""
    name = re.compile(re.escape(PARTIAL + final.name) + r"(\.[0-9a-f]{16})?")
    candidates = final.parent.glob(f"{PARTIAL}*") if final.parent.is_dir() else iter(())
    return [path for path in candidates if name.fullmatch(path.name) and path.lstat().st_uid == os.geteuid()]


@contextmanager
def storage_errors(final: Path) -> Iterator[None]:
    """Turn disk errors while writing `final` into a StorageError."""
    try:
        yield
    except (OSError, SafetensorError) as err:
        raise StorageError(
            f"Saving {final.name} failed: {_reason(err)}.",
            where=str(final),
            fix="Free disk space or correct the path, and try again; earlier saves are intact.",
        ) from err


def write_text(final: Path, text: str) -> None:
    """Replace a file atomically. The file is readable by this user only."""
    scratch = _scratch(final)
    try:
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, FILE)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        os.replace(scratch, final)
    except OSError as err:
        scratch.unlink(missing_ok=True)
        raise StorageError(
            f"Writing {final.name} failed: {_reason(err)}.",
            where=str(final),
            fix="Free space on its disk, and check that the folder is yours and writable; then rerun.",
        ) from err


def _reason(err: Exception) -> str:
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        # safetensors passes on the operating system's message, but not the errno
        if (isinstance(err, OSError) and err.errno == number) or os.strerror(number) in str(err):
            return f"the disk is full ({os.strerror(number)})"
    return str(err)


def sync(path: Path) -> None:
    """fsync a file or folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _replace(scratch: Path, final: Path) -> None:
    """Rename into place. A folder cannot be renamed over a non-empty one, so the old one is moved away first."""
    backup = _backup(final)
    if final.exists():
        shutil.rmtree(backup, ignore_errors=True)
        os.rename(final, backup)
    os.rename(scratch, final)
    sync(final.parent)
    shutil.rmtree(backup, ignore_errors=True)


def _backup(final: Path) -> Path:
    return final.with_name(f"{PARTIAL}old-{final.name}")


def _recover(final: Path) -> None:
    """Restore the backup if a crash happened between the two renames of `_replace`; not one that others put there."""
    backup = _backup(final)
    if not os.path.lexists(backup) or final.exists():
        return
    if backup.is_symlink() or not is_own(final.parent, backup.lstat().st_uid):
        raise PermissionError(f"{backup.name} beside it is a symlink or belongs to another user")
    os.rename(backup, final)
