"""Read Parquet and Arrow files batch by batch, without trusting their metadata.

Arrow trusts the offsets and indices of a memory-mapped file and reads out of bounds if they are wrong, so each batch is
fully validated before use. A few hundred bytes of Parquet can expand to gibibytes, so batches are decoded under a
memory limit. Batches are split into chunks here and converted to rows by the process that handles the chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from pantheraml.base.errors import DataError
from pantheraml.base.memory_room import memory_limit
from pantheraml.data.bounds import (
    DECODED_BASE,
    DECODED_FACTOR,
    LONG_ROW,
    MAX_DECODE_BYTES,
    MAX_NESTING,
    MAX_ROW_BYTES,
    ROWS_BASE,
    ROWS_PER_BYTE,
    format_mib,
)
from pantheraml.data.chunks import RowChunk
from pantheraml.data.rows import Row, RowError, Unit, excerpt

_BATCH_ROWS = 512
_BATCH_BYTES = 64 << 20  # according to the file's metadata; with long rows, fewer are decoded at a time
_CHUNK_BYTES = 4 << 20  # of values; a tokenizer needs many times as much, in each process


@dataclass(frozen=True)
class ArrowChunk:
    """A slice of a batch, serialized as an Arrow stream: pickling a slice would copy the whole batch."""

    file: str
    size: int
    data: bytes
    first_row: int
    unit: Unit = "row"

    def rows(self) -> Iterator[tuple[int, Row | RowError]]:
        try:
            with memory_limit():
                table = pa.ipc.open_stream(self.data).read_all()
                rows = table.to_pylist()
        except MemoryError as err:
            raise _too_large(self.file) from err
        except (pa.ArrowException, ValueError, ArithmeticError, LookupError) as err:  # such as a date after year 9999
            raise _unreadable(Path(self.file), "rows", err) from err
        nested = [field.name for field in table.schema if pa.types.is_nested(field.type)]
        for number, row in enumerate(rows, start=self.first_row):
            yield number, row | {name: _without_nulls(row[name]) for name in nested} if nested else row


def _without_nulls(value: Any) -> Any:
    """Drop null keys of objects: in a struct column, Arrow gives every object the keys of all others."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def read_parquet(path: Path) -> Iterator[ArrowChunk | RowChunk]:
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _check_depth(path, file.schema_arrow)
            rows = max(1, file.metadata.num_rows)
            splitter = _ChunkSplitter(path)
            for batch in _validated(path, _parquet_batches(file)):
                yield from splitter.chunks(batch, round(batch.num_rows / rows * path.stat().st_size))
    except (pa.ArrowException, ValueError) as err:  # ValueError: a name that is not UTF-8
        raise _unreadable(path, "Parquet", err) from err


def _parquet_batches(file: Any) -> Iterator[Any]:
    for index in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(index)
        bytes_per_row = max(1, group.total_byte_size) / max(1, group.num_rows)
        rows = max(1, min(_BATCH_ROWS, int(_BATCH_BYTES / bytes_per_row)))
        yield from file.iter_batches(batch_size=rows, row_groups=[index], use_threads=False)


def read_arrow(path: Path) -> Iterator[ArrowChunk | RowChunk]:
    """Read an Arrow stream, as `datasets` saves it."""
    try:
        with pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_stream(file)
            _check_depth(path, reader.schema)
            splitter = _ChunkSplitter(path)
            done = 0
            for batch in _validated(path, iter(reader)):
                at = file.tell()
                yield from splitter.chunks(batch, at - done)
                done = at
    except (pa.ArrowException, ValueError) as err:  # ValueError: a name that is not UTF-8
        raise _unreadable(path, "Arrow", err) from err


def _validated(path: Path, batches: Iterator[Any]) -> Iterator[Any]:
    """Decode each batch under the memory limit and validate it before anything in it is used."""
    size = path.stat().st_size
    max_rows, max_bytes = ROWS_BASE + ROWS_PER_BYTE * size, DECODED_BASE + DECODED_FACTOR * size
    rows = decoded = 0
    while True:
        try:
            with memory_limit():
                batch = next(batches, None)
                if batch is None:
                    return
                rows += batch.num_rows
                if rows > max_rows:
                    raise _too_many(path, f"{max_rows} rows")
                batch.validate(full=True)
                batch = _expand_encodings(batch)
        except MemoryError as err:
            raise _too_large(str(path)) from err
        decoded += batch.nbytes
        if decoded > max_bytes:
            raise _too_many(path, f"{format_mib(max_bytes)} of values")
        yield batch


def _expand_encodings(batch: Any) -> Any:
    """Expand dictionary, view and run-end encodings, so that the size of the batch is the size of its rows.

    With these encodings one long value may be shared by any number of rows.
    """
    fields = [field.with_type(_expanded_type(field.type)) for field in batch.schema]
    if all(field.type == plain.type for field, plain in zip(batch.schema, fields, strict=True)):
        return batch
    return batch.cast(pa.schema(fields))


def _expanded_type(kind: Any) -> Any:
    types = pa.types
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _expanded_type(kind.value_type)
    if types.is_string_view(kind):
        return pa.large_string()
    if types.is_binary_view(kind):
        return pa.large_binary()
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        return pa.large_list(_expanded_field(kind.value_field))
    if types.is_list(kind):
        return pa.list_(_expanded_field(kind.value_field))
    if types.is_large_list(kind):
        return pa.large_list(_expanded_field(kind.value_field))
    if types.is_struct(kind):
        return pa.struct([_expanded_field(kind.field(index)) for index in range(kind.num_fields)])
    return kind


def _expanded_field(field: Any) -> Any:
    return field.with_type(_expanded_type(field.type))


class _ChunkSplitter:
    """Splits the batches of one file into chunks and numbers their rows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next_row = 1

    def chunks(self, batch: Any, size: int) -> Iterator[ArrowChunk | RowChunk]:
        """Split a batch; `size` is its share of the file's bytes, for progress."""
        for part in _split_batch(batch):
            share = round(size * part.num_rows / batch.num_rows)
            if part.nbytes > MAX_ROW_BYTES:
                long = RowError(f"expected a shorter row: it is {LONG_ROW}")
                yield RowChunk(str(self._path), share, [(self._next_row, long)], "row")
            else:
                yield ArrowChunk(str(self._path), share, _serialize(part), self._next_row)
            self._next_row += part.num_rows


def _split_batch(batch: Any) -> Iterator[Any]:
    """Halve the batch until each part has at most _BATCH_ROWS rows, and at most _CHUNK_BYTES or a single row."""
    rows = batch.num_rows
    if rows > _BATCH_ROWS or (rows > 1 and batch.nbytes > _CHUNK_BYTES):
        step = _BATCH_ROWS if rows > _BATCH_ROWS else -(-rows // 2)
        for start in range(0, rows, step):
            yield from _split_batch(batch.slice(start, step))
    elif rows:
        yield batch


def _serialize(batch: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _check_depth(path: Path, schema: Any) -> None:
    level = [field.type for field in schema]
    for _ in range(MAX_NESTING):
        level = [kind.field(index).type for kind in level for index in range(kind.num_fields)]
        if not level:
            return
    raise DataError(
        f"The columns are nested deeper than {MAX_NESTING} levels, the maximum for a row.",
        where=str(path),
        fix="Flatten the columns.",
    )


def _too_large(file: str) -> DataError:
    return DataError(
        f"A batch of the file decodes to more than {format_mib(MAX_DECODE_BYTES)}, the maximum for a batch.",
        where=file,
        fix="Write the file with shorter rows, or as JSON Lines. A small file that expands this much may be an attack.",
    )


def _too_many(path: Path, maximum: str) -> DataError:
    return DataError(
        f"The file holds more than {maximum}, the maximum for a file of its size.",
        where=str(path),
        fix="Write the data as JSON Lines. A small file that expands this much may be an attack.",
    )


def _unreadable(path: Path, kind: str, err: Exception) -> DataError:
    return DataError(
        f"The file cannot be read as {kind}: it is damaged, or has another format ({excerpt(str(err))}).",
        where=str(path),
        fix="Write the file again.",
    )
