"""A folder of prepared data, held open: what was checked is what is read, even if its path is replaced meanwhile.

In a data.cache_dir that other users can write to, they can rename whole folders at any time. So owners are those of the
opened files, and everything is read from these.
"""

from __future__ import annotations

import json
import mmap
import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa

from pantheraml.base.errors import DataError
from pantheraml.base.private import is_trusted
from pantheraml.data.token_store import DATA_FILE, LAYOUT_VERSION, META_FILE, DatasetMeta, checksum, index_column

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class DataFolder:
    """Opens the folder and its files; OSError if one is missing, PermissionError if one belongs to another user."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        if path.is_symlink():
            raise PermissionError("it is a symlink")
        with ExitStack() as stack:
            folder = _open(stack, str(path), os.O_DIRECTORY)
            self._meta, self._data = (_open(stack, name, dir_fd=folder) for name in (META_FILE, DATA_FILE))
            for descriptor in (folder, self._meta, self._data):
                owner = os.fstat(descriptor).st_uid
                if not is_trusted(path.parent, owner):
                    raise PermissionError(f"it belongs to another user (uid {owner})")
            self._stack = stack.pop_all()

    def meta(self) -> DatasetMeta | None:
        """Return `meta.json`; None if it is unreadable or of another layout version."""
        try:
            with os.fdopen(os.dup(self._meta), encoding="utf-8") as file:
                file.seek(0)
                meta = DatasetMeta(**json.load(file))
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        return meta if meta.layout == LAYOUT_VERSION else None

    def table(self) -> Any:
        """Memory-map the Arrow table; only the footer is read. ValueError or OSError if it is damaged."""
        mapped = mmap.mmap(self._data, 0, access=mmap.ACCESS_READ)
        return pa.ipc.open_file(pa.BufferReader(pa.py_buffer(mapped))).read_all()

    def is_complete(self) -> bool:
        """Return whether the data matches `meta.json`: footer, number of sequences, sums of the index columns."""
        meta = self.meta()
        if meta is None:
            return False
        try:
            table = self.table()
        except (OSError, ValueError):  # includes pa.ArrowInvalid
            return False
        sums = [int(index_column(table, name).sum(dtype=np.int64)) for name in ("length", "target_tokens")]
        return table.num_rows == meta.sequences and sums == [meta.tokens, meta.target_tokens]

    def matches_checksum(self) -> bool:
        """Return whether a complete folder matches its fingerprint and checksum. Reads the whole data file."""
        meta = self.meta()
        with os.fdopen(os.dup(self._data), "rb") as file:
            file.seek(0)
            return meta is not None and meta.fingerprint == self._name and meta.checksum == checksum(file)

    def __enter__(self) -> DataFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()


def _open(stack: ExitStack, name: str, flags: int = 0, dir_fd: int | None = None) -> int:
    descriptor = os.open(name, _FLAGS | flags, dir_fd=dir_fd)
    stack.callback(os.close, descriptor)
    return descriptor


def read_meta(path: Path) -> DatasetMeta:
    """Return the `meta.json` of prepared data; DataError if there is none."""
    try:
        with DataFolder(path) as folder:
            meta = folder.meta()
    except OSError as err:
        raise unusable(path, err) from err
    if meta is None:
        raise unusable(path)
    return meta


def unusable(path: Path, err: Exception | None = None) -> DataError:
    """Return the error for prepared data that is not there, is damaged, or belongs to another user."""
    reason = f"is not used: {err}" if isinstance(err, PermissionError) else "is missing or damaged"
    return DataError(f"The prepared data {reason}.", where=str(path), fix="Prepare it again: rerun the command.")
