"""The tokenised data on disk: a folder with `data.arrow` (one row per sequence) and `meta.json`.

Rows hold the tokens, the length of each document and where it came from, and which tokens bear loss; two narrow
columns, length and target_tokens, serve as an index that is read without touching the tokens. A folder is written
aside, `meta.json` last, and renamed into place, so under its final name it is whole unless the disk damaged it, which
`is_whole` notices.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pantheraml.base.errors import DataError
from pantheraml.data.documents import Documents, Ints, joined_runs
from pantheraml.data.packing import best_fit_decreasing, window_tokens

LAYOUT_VERSION = 3
"""Raised whenever the same source would give other files: layout, templates, chunking, packing."""

DATA_FILE = "data.arrow"
META_FILE = "meta.json"

_INTS = pa.list_(pa.int32())
_MOST = np.iinfo(np.int32).max
"""Rows of a file beyond that many are told as this one."""
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
    """What `meta.json` says about the data beside it."""

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
    """In tokens; 0 in data that an earlier version prepared."""
    checksum: str = ""
    """blake2b of the data file; empty in data that an earlier version prepared."""
    unread: list[str] = field(default_factory=list)
    """Columns that the format does not use, the first of many; none in data that an earlier version prepared."""
    layout: int = LAYOUT_VERSION

    def efficiency(self) -> float:
        """Share of the sequences' room that holds tokens."""
        return self.tokens / (self.sequences * self.seq_len)


def read_meta(folder: Path) -> DatasetMeta | None:
    """The folder's description, or None where it is missing, unreadable or of another layout."""
    try:
        values = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
        meta = DatasetMeta(**values)
    except (OSError, ValueError, TypeError):
        return None
    return meta if meta.layout == LAYOUT_VERSION else None


def open_table(folder: Path) -> Any:
    """The memory-mapped Arrow table of a folder; nothing but the footer is read."""
    return pa.ipc.open_file(pa.memory_map(str(folder / DATA_FILE))).read_all()


def is_whole(folder: Path) -> bool:
    """Whether the folder's data is what its description says: footer, number of sequences, sums of the index."""
    meta = read_meta(folder)
    if meta is None:
        return False
    try:
        table = open_table(folder)
    except (OSError, pa.ArrowInvalid):
        return False
    sums = [int(index_column(table, name).sum(dtype=np.int64)) for name in ("length", "target_tokens")]
    return table.num_rows == meta.sequences and sums == [meta.tokens, meta.target_tokens]


def is_as_written(folder: Path) -> bool:
    """Whether a folder that is whole holds what was written under its name, to the last bit. Reads all of it."""
    meta = read_meta(folder)
    return meta is not None and meta.fingerprint == folder.name and meta.checksum == _checksum(folder)


def validate(folder: Path) -> None:
    """DataError unless the data can be read without harm: Arrow trusts lengths and offsets that a stranger may have
    written. For data that this user has not prepared."""
    try:
        open_table(folder).validate(full=True)
    except (OSError, pa.ArrowException) as err:
        raise DataError("The prepared data is missing or damaged.", where=str(folder)) from err


def _checksum(folder: Path) -> str:
    with open(folder / DATA_FILE, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def index_column(table: Any, name: str) -> Ints:
    """One of the narrow columns, whole."""
    return numbers(table.column(name).combine_chunks())


def numbers(array: Any) -> Ints:
    """What a pyarrow array of int32 holds, without a copy.

    Neither this nor `_ints` by pyarrow's own ways to and from numpy: they import pandas where it is installed, to ask
    whether the values are pandas', and that takes as long as a twentieth of all that a run imports.
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
        """`file`: the number of the source that they are from."""
        self._window.extend(documents, file)
        self._window_tokens += int(documents.lengths().sum(dtype=np.int64))
        if self._window_tokens >= window_tokens(self._seq_len):
            self._flush()

    def finish(self, meta: DatasetMeta) -> None:
        """Close the data and describe it; the counts of `meta` that the writer knows are filled in."""
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
            checksum=_checksum(self._folder),
        )
        (self._folder / META_FILE).write_text(json.dumps(dataclasses.asdict(meta), indent=1), encoding="utf-8")

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
        self.target_tokens += int(numbers(batch.column("target_tokens")).sum(dtype=np.int64))
        self.sequences += len(packs)
        self.largest_token = max(self.largest_token, int(numbers(batch.column("tokens").flatten()).max()))
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
    borders = np.concatenate([[0], np.cumsum(sizes)])  # of packs, counted in documents
    ends = np.concatenate([[0], np.cumsum(lengths[flat])])  # of documents, counted in tokens
    targets = np.fromiter((runs[1::2].sum() for runs in documents.loss_runs), dtype=np.int32, count=len(documents))
    runs = [list(joined_runs((documents.loss_runs[i], int(lengths[i])) for i in pack)) for pack in packs]
    run_borders = np.concatenate([[0], np.cumsum([len(each) for each in runs])])
    columns = [
        _lists(ends[borders], np.concatenate([documents.tokens[i] for i in flat])),
        _lists(borders, lengths[flat]),
        _lists(run_borders, np.fromiter(itertools.chain.from_iterable(runs), dtype=np.int64)),
        _ints(np.diff(ends[borders])),
        _ints(np.add.reduceat(targets[flat], borders[:-1])),
        _lists(borders, np.array(documents.files, dtype=np.int64)[flat]),
        _lists(borders, np.minimum(np.array(documents.rows, dtype=np.int64), _MOST)[flat]),
    ]
    return pa.record_batch(columns, schema=_SCHEMA)


def _lists(offsets: NDArray[Any], values: NDArray[Any]) -> Any:
    return pa.ListArray.from_arrays(_ints(offsets), _ints(values))


def _ints(values: NDArray[Any]) -> Any:
    """As int32; what does not fit into it is an error. The other way round: `numbers`."""
    buffers = [None, pa.py_buffer(np.ascontiguousarray(values))]
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), buffers).cast(pa.int32())
