"""Reading Parquet and Arrow files batch by batch, without trusting what they say of themselves.

Arrow believes the offsets and indices of a file that it maps, and reads out of bounds where they are wrong: each batch
is validated in full before anything of it is used. A few hundred bytes of Parquet can stand for gibibytes: batches are
decoded within a bound on memory. Batches are cut here and become rows wherever the chunk is handled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from pantheraml.base.errors import DataError
from pantheraml.base.memory_room import memory_room
from pantheraml.data.bounds import (
    DECODED_BASE,
    DECODED_FACTOR,
    DECODING_ROOM,
    LONG_ROW,
    NESTING,
    ROW_BYTES,
    ROWS_BASE,
    ROWS_PER_BYTE,
    mebibytes,
)
from pantheraml.data.chunks import RowChunk
from pantheraml.data.rows import Row, RowError, Unit, brief

_BATCH_ROWS = 512
_BATCH_BYTES = 64 << 20  # by what the file says; where rows are long, fewer of them are decoded at a time
_CHUNK_BYTES = 4 << 20  # of values; a tokenizer needs many times as much, in each process


@dataclass(frozen=True)
class ArrowChunk:
    """A batch of a Parquet or Arrow file, as an Arrow stream: a slice that is pickled would bring its whole batch."""

    file: str
    size: int
    data: bytes
    first_row: int
    unit: Unit = "row"

    def rows(self) -> Iterator[tuple[int, Row | RowError]]:
        try:
            with memory_room():
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
    """Objects without their null keys: in a column of objects, Arrow gives every one the keys of all others."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def read_parquet(path: Path) -> Iterator[ArrowChunk | RowChunk]:
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _refuse_depth(path, file.schema_arrow)
            rows = max(1, file.metadata.num_rows)
            cutter = _Cutter(path)
            for batch in _checked(path, _parquet_batches(file)):
                yield from cutter.chunks(batch, round(batch.num_rows / rows * path.stat().st_size))
    except (pa.ArrowException, ValueError) as err:  # ValueError: a name that is not UTF-8
        raise _unreadable(path, "Parquet", err) from err


def _parquet_batches(file: Any) -> Iterator[Any]:
    for index in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(index)
        bytes_per_row = max(1, group.total_byte_size) / max(1, group.num_rows)
        rows = max(1, min(_BATCH_ROWS, int(_BATCH_BYTES / bytes_per_row)))
        yield from file.iter_batches(batch_size=rows, row_groups=[index], use_threads=False)


def read_arrow(path: Path) -> Iterator[ArrowChunk | RowChunk]:
    """An Arrow stream, as `datasets` saves it."""
    try:
        with pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_stream(file)
            _refuse_depth(path, reader.schema)
            cutter = _Cutter(path)
            done = 0
            for batch in _checked(path, iter(reader)):
                at = file.tell()
                yield from cutter.chunks(batch, at - done)
                done = at
    except (pa.ArrowException, ValueError) as err:  # ValueError: a name that is not UTF-8
        raise _unreadable(path, "Arrow", err) from err


def _checked(path: Path, batches: Iterator[Any]) -> Iterator[Any]:
    """Each batch, decoded within a bound on memory, and found to be whole before anything in it is used."""
    size = path.stat().st_size
    rows, decoded = ROWS_BASE + ROWS_PER_BYTE * size, DECODED_BASE + DECODED_FACTOR * size
    while True:
        try:
            with memory_room():
                batch = next(batches, None)
                if batch is None:
                    return
                rows -= batch.num_rows
                if rows < 0:
                    raise _too_many(path, f"{ROWS_BASE + ROWS_PER_BYTE * size} rows")
                batch.validate(full=True)
                batch = _plain(batch)
        except MemoryError as err:
            raise _too_large(str(path)) from err
        decoded -= batch.nbytes
        if decoded < 0:
            raise _too_many(path, f"{mebibytes(DECODED_BASE + DECODED_FACTOR * size)} of values")
        yield batch


def _plain(batch: Any) -> Any:
    """The batch with every value in its own place, so that its size is what its rows take.

    In a dictionary, a view or a run, one long value may stand for any number of rows.
    """
    fields = [field.with_type(_plain_type(field.type)) for field in batch.schema]
    if all(field.type == plain.type for field, plain in zip(batch.schema, fields, strict=True)):
        return batch
    return batch.cast(pa.schema(fields))


def _plain_type(kind: Any) -> Any:
    types = pa.types
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _plain_type(kind.value_type)
    if types.is_string_view(kind):
        return pa.large_string()
    if types.is_binary_view(kind):
        return pa.large_binary()
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        return pa.large_list(_plain_field(kind.value_field))
    if types.is_list(kind):
        return pa.list_(_plain_field(kind.value_field))
    if types.is_large_list(kind):
        return pa.large_list(_plain_field(kind.value_field))
    if types.is_struct(kind):
        return pa.struct([_plain_field(kind.field(index)) for index in range(kind.num_fields)])
    return kind


def _plain_field(field: Any) -> Any:
    return field.with_type(_plain_type(field.type))


class _Cutter:
    """Cuts the batches of one file into chunks, and counts their rows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next_row = 1

    def chunks(self, batch: Any, size: int) -> Iterator[ArrowChunk | RowChunk]:
        """The batch in parts of few rows; `size` is its share of the file's bytes."""
        for part in _parts(batch):
            share = round(size * part.num_rows / batch.num_rows)
            if part.nbytes > ROW_BYTES:
                long = RowError(f"expected a shorter row: it is {LONG_ROW}")
                yield RowChunk(str(self._path), share, [(self._next_row, long)], "row")
            else:
                yield ArrowChunk(str(self._path), share, _streamed(part), self._next_row)
            self._next_row += part.num_rows


def _parts(batch: Any) -> Iterator[Any]:
    """The batch in halves of halves, until each has few rows, and few bytes or a single row."""
    rows = batch.num_rows
    if rows > _BATCH_ROWS or (rows > 1 and batch.nbytes > _CHUNK_BYTES):
        step = _BATCH_ROWS if rows > _BATCH_ROWS else -(-rows // 2)
        for start in range(0, rows, step):
            yield from _parts(batch.slice(start, step))
    elif rows:
        yield batch


def _streamed(batch: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _refuse_depth(path: Path, schema: Any) -> None:
    level = [field.type for field in schema]
    for _ in range(NESTING):
        level = [kind.field(index).type for kind in level for index in range(kind.num_fields)]
        if not level:
            return
    raise DataError(
        f"The columns are nested deeper than {NESTING} levels, the most that a row may be.",
        where=str(path),
        todo="Write the data with plain columns.",
    )


def _too_large(file: str) -> DataError:
    return DataError(
        f"A batch of the file decodes to more than {mebibytes(DECODING_ROOM)}, the most that a batch may take.",
        where=file,
        todo="Write the file with shorter rows, or as JSON Lines. A small file that asks for so much may be an attack.",
    )


def _too_many(path: Path, most: str) -> DataError:
    return DataError(
        f"The file holds more than {most}, the most that one of its size may.",
        where=str(path),
        todo="Write the data as JSON Lines. A small file that stands for so much may be an attack.",
    )


def _unreadable(path: Path, kind: str, err: Exception) -> DataError:
    return DataError(
        f"The file cannot be read as {kind}: it is damaged, or of another kind ({brief(str(err))}).",
        where=str(path),
        todo="Write the file again.",
    )
