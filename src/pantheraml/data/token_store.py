"""On-disk format of prepared data: a folder with `data.arrow` (one row per sequence) and `meta.json`.

A row holds the tokens, the length and source of each document, and the loss runs; two narrow columns, length and
target_tokens, are an index that is read without touching the tokens. A folder is written under a temporary name,
`meta.json` last, and renamed, so under its final name it is complete unless the disk damaged it, which
`DataFolder.is_complete` detects.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pantheraml.data.documents import Documents, Ints, concatenate_runs
from pantheraml.data.packing import best_fit_decreasing, window_tokens

LAYOUT_VERSION = 3
"""Incremented whenever the same source would give different files: layout, templates, chunking, packing."""

DATA_FILE = "data.arrow"
META_FILE = "meta.json"

_INTS = pa.list_(pa.int32())
_MAX_ROW = np.iinfo(np.int32).max
"""Largest row number that is stored; later rows are clamped to it."""
_SCHEMA = pa.schema(
    [
        ("tokens", _INTS),
        ("document_lengths", _INTS),
        ("loss_runs", _INTS),
        ("length", pa.int32()),
        ("target_tokens", pa.int32()),
        ("document_files", _INTS),
        ("document_rows", _INTS),
    ]
)


@dataclass(frozen=True)
class DatasetMeta:
    """Content of `meta.json`."""

    fingerprint: str
    format: str
    seq_len: int
    packed: bool
    pad_id: int
    rows: int
    skipped_rows: int
    truncated_rows: int
    tokens: int = 0
    target_tokens: int = 0
    sequences: int = 0
    largest_token: int = 0
    longest_document: int = 0
    """Length in tokens; 0 in data prepared by earlier versions."""
    checksum: str = ""
    """blake2b of the data file; empty in data prepared by earlier versions."""
    unused_columns: list[str] = field(default_factory=list)
    """The first columns that the format does not use; empty in data prepared by earlier versions."""
    layout: int = LAYOUT_VERSION

    def efficiency(self) -> float:
        """Return the packing efficiency: the fraction of sequence positions that hold tokens."""
        return self.tokens / (self.sequences * self.seq_len)


def checksum(file: BufferedReader) -> str:
    """Return the checksum of a data file."""
    return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def index_column(table: Any, name: str) -> Ints:
    """Read one of the narrow index columns."""
    return to_numpy(table.column(name).combine_chunks())


def to_numpy(array: Any) -> Ints:
    """Return a zero-copy NumPy view of a pyarrow int32 array.

    This and `_to_arrow` avoid pyarrow's own NumPy conversions: those import pandas if it is installed, to check for
    pandas values, which takes a twentieth of the import time of a run.
    """
    return np.asarray(np.from_dlpack(array), dtype=np.int32)


class DatasetWriter:
    """Writes sequences to an empty folder as documents arrive; memory is bounded by one packing window."""

    def __init__(self, folder: Path, *, seq_len: int, packed: bool) -> None:
        self._folder = folder
        self._seq_len = seq_len
        self._packed = packed
        self._file = pa.OSFile(str(folder / DATA_FILE), "wb")
        self._writer = pa.ipc.new_file(self._file, _SCHEMA)
        self._window = Documents()
        self._window_tokens = 0
        self.tokens = 0
        self.target_tokens = 0
        self.sequences = 0
        self.largest_token = 0
        self.longest_document = 0

    def add(self, documents: Documents, file: int = 0) -> None:
        """Add documents of the source file with index `file`."""
        self._window.extend(documents, file)
        self._window_tokens += int(documents.lengths().sum(dtype=np.int64))
        if self._window_tokens >= window_tokens(self._seq_len):
            self._flush()

    def finish(self, meta: DatasetMeta) -> None:
        """Close the data file and write `meta`, with the writer's counts filled in."""
        self._flush()
        self._writer.close()
        self._file.close()
        meta = dataclasses.replace(
            meta,
            tokens=self.tokens,
            target_tokens=self.target_tokens,
            sequences=self.sequences,
            largest_token=self.largest_token,
            longest_document=self.longest_document,
            checksum=self._checksum(),
        )
        (self._folder / META_FILE).write_text(json.dumps(dataclasses.asdict(meta), indent=1), encoding="utf-8")

    def _checksum(self) -> str:
        with open(self._folder / DATA_FILE, "rb") as file:
            return checksum(file)

    def _flush(self) -> None:
        if not self._window:
            return
        lengths = self._window.lengths()
        packs = (
            best_fit_decreasing(lengths, self._seq_len) if self._packed else [[index] for index in range(len(lengths))]
        )
        batch = _record_batch(self._window, lengths, packs)
        self._writer.write_batch(batch)
        self.tokens += int(lengths.sum(dtype=np.int64))
        self.target_tokens += int(to_numpy(batch.column("target_tokens")).sum(dtype=np.int64))
        self.sequences += len(packs)
        self.largest_token = max(self.largest_token, int(to_numpy(batch.column("tokens").flatten()).max()))
        self.longest_document = max(self.longest_document, int(lengths.max()))
        self._window = Documents()
        self._window_tokens = 0

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()


def _record_batch(documents: Documents, lengths: Ints, packs: Sequence[Sequence[int]]) -> Any:
    flat = list(itertools.chain.from_iterable(packs))
    sizes = np.fromiter(map(len, packs), dtype=np.int64, count=len(packs))
    offsets = np.concatenate([[0], np.cumsum(sizes)])  # pack offsets, in documents
    ends = np.concatenate([[0], np.cumsum(lengths[flat])])  # document offsets, in tokens
    targets = np.fromiter((runs[1::2].sum() for runs in documents.loss_runs), dtype=np.int32, count=len(documents))
    runs = [list(concatenate_runs((documents.loss_runs[i], int(lengths[i])) for i in pack)) for pack in packs]
    run_offsets = np.concatenate([[0], np.cumsum([len(each) for each in runs])])
    columns = [
        _lists(ends[offsets], np.concatenate([documents.tokens[i] for i in flat])),
        _lists(offsets, lengths[flat]),
        _lists(run_offsets, np.fromiter(itertools.chain.from_iterable(runs), dtype=np.int64)),
        _to_arrow(np.diff(ends[offsets])),
        _to_arrow(np.add.reduceat(targets[flat], offsets[:-1])),
        _lists(offsets, np.array(documents.files, dtype=np.int64)[flat]),
        _lists(offsets, np.minimum(np.array(documents.rows, dtype=np.int64), _MAX_ROW)[flat]),
    ]
    return pa.record_batch(columns, schema=_SCHEMA)


def _lists(offsets: NDArray[Any], values: NDArray[Any]) -> Any:
    return pa.ListArray.from_arrays(_to_arrow(offsets), _to_arrow(values))


def _to_arrow(values: NDArray[Any]) -> Any:
    """Convert to a pyarrow int32 array; values out of range raise. The inverse is `to_numpy`."""
    buffers = [None, pa.py_buffer(np.ascontiguousarray(values))]
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), buffers).cast(pa.int32())
