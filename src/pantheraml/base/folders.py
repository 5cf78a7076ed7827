"""Writing a folder or a file so that it is either whole or not there.

A folder is written beside its place, flushed to disk and renamed. A crash or a full disk leaves at most a `.partial-*`
folder, which the next save of the same name removes; what stood there before stays whole.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from pantheraml.base.errors import RunDirectoryError, StorageError

PARTIAL = ".partial-"


@contextmanager
def committed_folder(final: Path, *, make_parents: bool = True) -> Iterator[Path]:
    """A scratch folder to write into; if the block ends without error, it takes the place of `final`.

    Without `make_parents` the folder around it is made, but none above that: where one is gone, it fails.
    """
    scratch = scratch_folder(final)
    try:
        with storage_errors(final):
            final.parent.mkdir(parents=make_parents, exist_ok=True)
            _recover(final)
            if scratch.exists():
                shutil.rmtree(scratch)  # if it cannot be removed, why not is what people should be told
            scratch.mkdir()
            yield scratch
            for path in [*scratch.rglob("*"), scratch]:
                sync(path)
            _replace(scratch, final)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def require_empty(output: Path) -> None:
    """A folder that people name for a model must not hold anything of theirs."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise RunDirectoryError(f"{output} is not an empty folder.", todo="Choose another --output.")


@contextmanager
def no_scratch_left(final: Path) -> Iterator[None]:
    """If the block fails, what another process has begun to write for `final`, and could not remove, is removed."""
    try:
        yield
    except BaseException:
        shutil.rmtree(scratch_folder(final), ignore_errors=True)
        raise


def scratch_folder(final: Path) -> Path:
    """Where `committed_folder` has others write, who know the final place alone."""
    return final.with_name(PARTIAL + final.name)


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
    """Replace a file's content in one move."""
    scratch = final.with_name(PARTIAL + final.name)
    try:
        scratch.write_text(text, encoding="utf-8")
        sync(scratch)
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
