"""Writing a folder or a file so that it is either whole or not there.

A folder is written beside its place, flushed to disk and renamed. A crash or a full disk leaves at most a `.partial-*`
folder, which the next save of the same name removes; what stood there before stays whole. Nobody can know the name of
what is written aside, and so put a link there.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from pantheraml.base.errors import RunDirectoryError, StorageError
from pantheraml.base.private import FILE, FOLDER
from pantheraml.base.roots import require_allowed

PARTIAL = ".partial-"


@contextmanager
def committed_folder(final: Path, *, make_parents: bool = True, private: bool = False) -> Iterator[Path]:
    """A scratch folder to write into; if the block ends without error, it takes the place of `final`.

    Without `make_parents` the folder around it is made, but none above that: where one is gone, it fails. A `private`
    folder is for this user alone; otherwise it is for whom the umask says.
    """
    scratch = _scratch(final)
    try:
        with storage_errors(final):
            final.parent.mkdir(parents=make_parents, exist_ok=True)
            _recover(final)
            for leftover in _leftovers(final):
                shutil.rmtree(leftover)  # if it cannot be removed, why not is what people should be told
            scratch.mkdir(FOLDER if private else 0o777)
            yield scratch
            if not private:
                _open_as_umask_says(scratch)
            for path in [*scratch.rglob("*"), scratch]:
                sync(path)
            _replace(scratch, final)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _open_as_umask_says(folder: Path) -> None:
    """safetensors writes files that nobody else can read, whatever the umask."""
    umask = os.umask(0o077)  # it can only be read by setting it
    os.umask(umask)
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            os.chmod(path, 0o666 & ~umask)


def require_empty(output: Path) -> None:
    """A folder that people name for a model must not hold anything of theirs."""
    require_allowed(output, key="--output")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise RunDirectoryError(f"{output} is not an empty folder.", todo="Choose another --output.")


@contextmanager
def no_scratch_left(final: Path) -> Iterator[None]:
    """If the block fails, what another process has begun to write for `final`, and could not remove, is removed."""
    try:
        yield
    except BaseException:
        for leftover in _leftovers(final):
            shutil.rmtree(leftover, ignore_errors=True)
        raise


def _scratch(final: Path) -> Path:
    return final.with_name(f"{PARTIAL}{final.name}.{secrets.token_hex(8)}")


def _leftovers(final: Path) -> list[Path]:
    """What earlier writers of `final`, of this user, have left."""
    name = re.compile(re.escape(PARTIAL + final.name) + r"(\.[0-9a-f]{16})?")
    found = final.parent.glob(f"{PARTIAL}*") if final.parent.is_dir() else iter(())
    return [path for path in found if name.fullmatch(path.name) and path.lstat().st_uid == os.geteuid()]


@contextmanager
def storage_errors(final: Path) -> Iterator[None]:
    """What goes wrong with the disk while `final` is written is a StorageError."""
    try:
        yield
    except (OSError, SafetensorError) as err:
        raise StorageError(
            f"Saving {final.name} failed: {_reason(err)}.",
            where=str(final),
            todo="Make room or correct the path, and try again; what was saved before is whole.",
        ) from err


def write_text(final: Path, text: str) -> None:
    """Replace a file's content in one move. The file is for this user alone."""
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
        raise StorageError(f"Writing {final.name} failed: {_reason(err)}.", where=str(final)) from err


def _reason(err: Exception) -> str:
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        # safetensors hands the operating system's words through, but not its number
        if (isinstance(err, OSError) and err.errno == number) or os.strerror(number) in str(err):
            return f"the disk is full ({os.strerror(number)})"
    return str(err)


def sync(path: Path) -> None:
    """Have the disk hold what was written."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _replace(scratch: Path, final: Path) -> None:
    """Rename into place. A folder cannot be renamed over a filled one, so an old one is moved aside first."""
    aside = _aside(final)
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(final, aside)
    os.rename(scratch, final)
    sync(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _aside(final: Path) -> Path:
    return final.with_name(f"{PARTIAL}old-{final.name}")


def _recover(final: Path) -> None:
    """A crash between the two renames of `_replace` left the old folder aside: put it back."""
    if _aside(final).exists() and not final.exists():
        os.rename(_aside(final), final)
