"""Reading source files in chunks, so that memory does not grow with their size.

Lines and Arrow batches are cut here and parsed by whoever handles the chunk, usually another process. JSON arrays and
CSV have to be parsed to find where a row ends, so their chunks carry parsed rows. Where a file is cut depends on its
content alone, never on the number of processes.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from pantheraml.base.errors import DataError
from pantheraml.data.rows import Row, RowError, Unit, kind_of, shown

_CHUNK_BYTES = 1 << 20
_ARROW_ROWS = 512
_BLANK = " \t\r\n"
_LONGEST_LITERAL = 16  # "-Infinity" or an escaped surrogate pair; errors further from the window's edge are real


@dataclass(frozen=True)
class LineChunk:
    """Whole lines of a text file, still bytes: JSON Lines, or plain text with one document a line."""

    file: str
    data: bytes
    offset: int
    first_line: int
    plain: bool
    unit: Unit = "line"

    @property
    def size(self) -> int:
        return len(self.data)

    def rows(self) -> Iterator[tuple[int, Row | RowError]]:
        try:
            lines: Iterable[str | RowError] = self.data.decode("utf-8").split("\n")
        except UnicodeDecodeError:
            lines = self._decoded_one_by_one()
        for number, line in enumerate(lines, start=self.first_line):
            if isinstance(line, RowError):
                yield number, line
            elif line := line.strip(_BLANK):
                yield number, {"text": line} if self.plain else _parsed_line(line)

    def _decoded_one_by_one(self) -> Iterator[str | RowError]:
        offset = self.offset
        for line in self.data.split(b"\n"):
            try:
                yield line.decode("utf-8")
            except UnicodeDecodeError as err:
                yield RowError(_not_utf8(err, offset))
            offset += len(line) + 1


@dataclass(frozen=True)
class RowChunk:
    """Rows that are parsed already."""

    file: str
    size: int
    numbered: list[tuple[int, Row | RowError]]
    unit: Unit = "line"

    def rows(self) -> Iterator[tuple[int, Row | RowError]]:
        yield from self.numbered


@dataclass(frozen=True)
class ArrowChunk:
    """A batch of a Parquet or Arrow file, as an Arrow stream: a slice that is pickled would bring its whole batch."""

    file: str
    size: int
    data: bytes
    first_row: int
    unit: Unit = "row"

    def rows(self) -> Iterator[tuple[int, Row | RowError]]:
        yield from enumerate(pa.ipc.open_stream(self.data).read_all().to_pylist(), start=self.first_row)


def read_lines(path: Path, *, plain: bool) -> Iterator[LineChunk]:
    """Chunks of about a mebibyte that end at line ends."""
    offset, line = 0, 1
    with open(path, "rb") as file:
        start = file.read(len(codecs.BOM_UTF8))
        refuse_utf16(path, start)
        rest = start.removeprefix(codecs.BOM_UTF8)
        offset += len(start) - len(rest)
        while block := file.read(_CHUNK_BYTES):
            data = rest + block
            if not data.endswith(b"\n"):
                data += file.readline()
            yield LineChunk(str(path), data[:-1] if data.endswith(b"\n") else data, offset, line, plain)
            offset += len(data)
            line += data.count(b"\n")
            rest = b""
        if rest:
            yield LineChunk(str(path), rest, offset, line, plain)


def read_json(path: Path) -> Iterator[LineChunk | RowChunk]:
    """A `.json` file: one array of objects, or (as many tools write) JSON Lines under that name."""
    with open(path, "rb") as file:
        start = file.read(4096)
    refuse_utf16(path, start)
    if start.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        yield from _read_array(path)
    else:
        yield from read_lines(path, plain=False)


def _read_array(path: Path) -> Iterator[RowChunk]:
    """Decodes element by element from a sliding window of text, and cuts a chunk per mebibyte."""
    text = _SlidingText(path)
    text.skip("[")
    numbered: list[tuple[int, Row | RowError]] = []
    start = text.consumed
    while not text.at("]"):
        line = text.line
        value = text.element()
        numbered.append((line, value if isinstance(value, dict) else _not_an_object(value)))
        if not text.at("]"):
            text.skip(",")
        if text.consumed - start >= _CHUNK_BYTES:
            yield RowChunk(str(path), text.consumed - start, numbered)
            numbered, start = [], text.consumed
    text.skip("]")
    text.expect_end()
    yield RowChunk(str(path), text.consumed - start, numbered)


class _SlidingText:
    """The undecoded rest of a JSON file: a window that grows only when an element does not fit into it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._blocks = _decoded_blocks(path)
        self._text = ""
        self._at = 0
        self.line = 1
        self.consumed = 0
        self._decoder = json.JSONDecoder()

    def at(self, mark: str) -> bool:
        """Skip white space, and say whether `mark` comes next."""
        while True:
            end = self._at
            while end < len(self._text) and self._text[end] in _BLANK:
                end += 1
            self._advance(end)
            if self._at < len(self._text):
                return self._text[self._at] == mark
            if not self._more():
                raise self._error("the file ends inside the array")

    def skip(self, mark: str) -> None:
        if not self.at(mark):
            raise self._error(f"expected `{mark}`, found {shown(self._text[self._at : self._at + 20])}")
        self._advance(self._at + 1)

    def element(self) -> object:
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as err:
                if self._may_be_cut(err) and self._more():
                    continue
                raise self._error(f"not JSON: {err.msg}") from err
            except (ValueError, RecursionError) as err:
                raise self._error(f"an element cannot be read: {err}") from err
            if end == len(self._text) and self._more():
                continue  # a number at the window's edge may go on
            self._advance(end)
            return value

    def _may_be_cut(self, err: json.JSONDecodeError) -> bool:
        """Whether more text could mend the error; if not, reading on would fill the memory for nothing."""
        return err.msg.startswith("Unterminated string") or len(self._text) - err.pos < _LONGEST_LITERAL

    def expect_end(self) -> None:
        while self._more():
            pass
        if self._text[self._at :].strip(_BLANK):
            raise self._error("something follows the end of the array")

    def _advance(self, to: int) -> None:
        passed = self._text[self._at : to]
        self.line += passed.count("\n")
        self.consumed += len(passed)
        self._at = to

    def _more(self) -> bool:
        block = next(self._blocks, "")
        self._text = self._text[self._at :] + block
        self._at = 0
        return bool(block)

    def _error(self, problem: str) -> DataError:
        return DataError(
            f"The file is not a JSON array of objects: {problem}.",
            where=f"{self._path}, line {self.line}",
            todo="Correct the file, or save it as JSON Lines (one object a line).",
        )


def _decoded_blocks(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    offset, line = 0, 1
    with open(path, "rb") as file:
        while True:
            block = file.read(_CHUNK_BYTES)
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as err:
                line += err.object[: err.start].count(b"\n")
                raise _encoding_error(path, line, _not_utf8(err, offset - pending)) from err
            if text:
                yield text
            if not block:
                return
            offset += len(block)
            line += text.count("\n")


def read_csv(path: Path) -> Iterator[RowChunk]:
    """Comma-separated values with a header line; quoted fields may hold line ends."""
    numbered: list[tuple[int, Row | RowError]] = []
    with open(path, "rb") as file, _long_csv_fields():
        refuse_utf16(path, file.read(4))
        file.seek(0)
        reader = csv.reader(_decoded_lines(path, file), strict=True)
        try:
            header = next(reader, [])
            start, line = file.tell(), reader.line_num
            for values in reader:
                if values:
                    numbered.append((line + 1, _csv_row(header, values)))
                line = reader.line_num
                if file.tell() - start >= _CHUNK_BYTES:
                    yield RowChunk(str(path), file.tell() - start, numbered)
                    numbered, start = [], file.tell()
        except csv.Error as err:
            raise DataError(
                f"The file is not valid CSV: {err}.",
                where=f"{path}, line {reader.line_num}",
                todo="Quote fields that hold commas, quotes or line ends, and double the quotes inside them.",
            ) from err
        yield RowChunk(str(path), file.tell() - start, numbered)


def _csv_row(header: list[str], values: list[str]) -> Row | RowError:
    if len(values) != len(header):
        return RowError(f"expected {len(header)} fields ({', '.join(header)}), found {len(values)}")
    return dict(zip(header, values, strict=True))


def _decoded_lines(path: Path, file: Iterable[bytes]) -> Iterator[str]:
    offset = 0
    for number, line in enumerate(file, start=1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as err:
            raise _encoding_error(path, number, _not_utf8(err, offset)) from err
        offset += len(line)


@contextlib.contextmanager
def _long_csv_fields() -> Iterator[None]:
    """The csv module refuses fields above 128 KiB unless told otherwise, and can only be told for the whole process."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def read_parquet(path: Path) -> Iterator[ArrowChunk]:
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            batches = file.iter_batches(batch_size=_ARROW_ROWS, use_threads=False)
            yield from _arrow_chunks(path, batches, rows=file.metadata.num_rows)
    except pa.ArrowException as err:
        raise _unreadable(path, "Parquet", err) from err


def read_arrow(path: Path) -> Iterator[ArrowChunk]:
    """An Arrow stream, as `datasets` saves it."""
    try:
        with pa.memory_map(str(path)) as file:
            rows = sum(batch.num_rows for batch in pa.ipc.open_stream(file))
            file.seek(0)
            yield from _arrow_chunks(path, pa.ipc.open_stream(file), rows)
    except pa.ArrowException as err:
        raise _unreadable(path, "Arrow", err) from err


def _arrow_chunks(path: Path, batches: Iterable[Any], rows: int) -> Iterator[ArrowChunk]:
    bytes_per_row = path.stat().st_size / max(1, rows)
    first = 1
    for batch in batches:
        for start in range(0, batch.num_rows, _ARROW_ROWS):
            part = batch.slice(start, _ARROW_ROWS)
            yield ArrowChunk(str(path), round(part.num_rows * bytes_per_row), _streamed(part), first)
            first += part.num_rows


def _streamed(batch: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _parsed_line(line: str) -> Row | RowError:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as err:
        reason = err.msg if isinstance(err, json.JSONDecodeError) else str(err)
        return RowError(f"expected a JSON object, found {shown(line)} (not JSON: {reason})")
    return value if isinstance(value, dict) else _not_an_object(value)


def _not_an_object(value: object) -> RowError:
    return RowError(f"expected a JSON object, found {kind_of(value)}")


def _not_utf8(err: UnicodeDecodeError, offset: int) -> str:
    return f"expected UTF-8 text, found byte 0x{err.object[err.start]:02x} at byte offset {offset + err.start}"


def _encoding_error(path: Path, line: int, problem: str) -> DataError:
    return DataError(
        f"The file is not UTF-8: {problem}.", where=f"{path}, line {line}", todo="Save the file as UTF-8 text."
    )


def refuse_utf16(path: Path, start: bytes) -> None:
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(
            "The file is UTF-16, not UTF-8 (byte offset 0 holds a UTF-16 mark).",
            where=f"{path}, line 1",
            todo="Save the file as UTF-8 text.",
        )


def _unreadable(path: Path, kind: str, err: Exception) -> DataError:
    return DataError(f"The file cannot be read as {kind}: {err}.", where=str(path), todo="Write the file again.")
