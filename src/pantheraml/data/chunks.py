"""Read text source files (JSON Lines, JSON, CSV, plain text) in chunks, with memory independent of file size.

Line-based files are split here and parsed by the process that handles the chunk. JSON arrays and CSV must be parsed to
find the end of a row, so their chunks carry parsed rows. Chunk boundaries depend on the content of the file only, never
on the number of processes.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pantheraml.base.errors import DataError
from pantheraml.data.bounds import LONG_ROW, MAX_NESTING, MAX_ROW_BYTES, row_too_long, too_deep
from pantheraml.data.rows import Row, RowError, Unit, describe, join_names, short_repr

_CHUNK_BYTES = 1 << 20
_BLANK = " \t\r\n"
_DELIMITERS = (",", ";", "\t", "|")
_LONGEST_LITERAL = 16  # "-Infinity" or an escaped surrogate pair; errors further from the window's edge are real


@dataclass(frozen=True)
class LineChunk:
    """Complete lines of a file as bytes: JSON Lines, or plain text with one document per line."""

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
                yield number, {"text": line} if self.plain else _parse_line(line)

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
    """Rows that are already parsed."""

    file: str
    size: int
    numbered: list[tuple[int, Row | RowError]]
    unit: Unit = "line"

    def rows(self) -> Iterator[tuple[int, Row | RowError]]:
        yield from self.numbered


def read_lines(path: Path, *, plain: bool) -> Iterator[LineChunk | RowChunk]:
    """Yield chunks of about 1 MiB that end at line breaks."""
    offset, line = 0, 1
    with open(path, "rb") as file:
        start = file.read(len(codecs.BOM_UTF8))
        reject_utf16(path, start)
        rest = start.removeprefix(codecs.BOM_UTF8)
        offset += len(start) - len(rest)
        while block := file.read(_CHUNK_BYTES):
            data = rest + block
            rest = b""
            if not data.endswith(b"\n"):
                data += file.readline(MAX_ROW_BYTES)
            whole = data if data.endswith(b"\n") or not file.peek(1) else data[: data.rfind(b"\n") + 1]
            if whole:
                yield LineChunk(str(path), whole.removesuffix(b"\n"), offset, line, plain)
                offset += len(whole)
                line += whole.count(b"\n")
            if len(whole) < len(data):
                size = len(data) - len(whole) + _skip_line(file)
                yield RowChunk(str(path), size, [(line, RowError(f"expected a shorter row: it is {LONG_ROW}"))])
                offset += size
                line += 1
        if rest:
            yield LineChunk(str(path), rest, offset, line, plain)


def _skip_line(file: BinaryIO) -> int:
    """Skip the rest of a line and return its length."""
    skipped = 0
    while part := file.readline(_CHUNK_BYTES):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def read_json(path: Path) -> Iterator[LineChunk | RowChunk]:
    """Read a `.json` file: one array of objects, or JSON Lines, which many tools write under that extension."""
    with open(path, "rb") as file:
        reject_utf16(path, file.read(4))
    if starts_array(path):
        yield from _read_array(path)
    else:
        yield from read_lines(path, plain=False)


def starts_array(path: Path) -> bool:
    """Return whether a file holds a JSON array rather than JSON Lines."""
    with open(path, "rb") as file:
        return file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _read_array(path: Path) -> Iterator[RowChunk]:
    """Decode element by element from a sliding window of text, and yield a chunk per MiB."""
    text = _SlidingText(path)
    text.skip("[")
    numbered: list[tuple[int, Row | RowError]] = []
    start = text.consumed
    while not text.at("]"):
        line = text.line
        value = text.element()
        numbered.append((line, _as_row(value)))
        if not text.at("]"):
            text.skip(",")
        if text.consumed - start >= _CHUNK_BYTES:
            yield RowChunk(str(path), text.consumed - start, numbered)
            numbered, start = [], text.consumed
    text.skip("]")
    text.expect_end()
    yield RowChunk(str(path), text.consumed - start, numbered)


class _SlidingText:
    """Sliding window over a JSON file that grows only when an element does not fit."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._blocks = _decoded_blocks(path)
        self._text = ""
        self._at = 0
        self.line = 1
        self.consumed = 0
        self._decoder = json.JSONDecoder()

    def at(self, mark: str) -> bool:
        """Skip white space and return whether `mark` comes next."""
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
            raise self._error(f"expected `{mark}`, found {short_repr(self._text[self._at : self._at + 20])}")
        self._advance(self._at + 1)

    def element(self) -> object:
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as err:
                if self._may_be_truncated(err) and self._more():
                    continue
                raise self._error(f"not JSON: {err.msg}") from err
            except RecursionError as err:
                raise self._error(f"an element has more than {MAX_NESTING} levels of lists and objects") from err
            except ValueError as err:  # such as a number of thousands of digits
                raise self._error(f"an element cannot be read: {err}") from err
            if end == len(self._text) and self._more():
                continue  # a number at the window's edge may continue
            self._advance(end)
            return value

    def _may_be_truncated(self, err: json.JSONDecodeError) -> bool:
        """Return whether more text could fix the error; if not, reading on would fill memory for nothing."""
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
        """Read at least one block, and at least double the pending text, so that long elements are rarely retried."""
        waiting = len(self._text) - self._at
        if waiting > MAX_ROW_BYTES:
            raise row_too_long(f"{self._path}, line {self.line}")
        blocks = [block] if (block := next(self._blocks, "")) else []
        while blocks and sum(map(len, blocks)) < waiting and (block := next(self._blocks, "")):
            blocks.append(block)
        self._text = self._text[self._at :] + "".join(blocks)
        self._at = 0
        return bool(blocks)

    def _error(self, problem: str) -> DataError:
        return DataError(
            f"The file is not a JSON array of objects: {problem}.",
            where=f"{self._path}, line {self.line}",
            fix="Correct the file, or save it as JSON Lines (one object per line).",
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


def csv_delimiter(path: Path) -> str:
    """Return the delimiter that splits the header into the most fields; a comma if none does."""
    with open(path, "rb") as file:
        header = file.readline(_CHUNK_BYTES).decode("utf-8-sig", errors="replace")
    try:
        fields = {mark: len(next(csv.reader([header], delimiter=mark), [])) for mark in _DELIMITERS}
    except csv.Error:  # a field too long to be a column name
        return ","
    return max(_DELIMITERS, key=fields.__getitem__)  # ties: the first one


def read_csv(path: Path) -> Iterator[RowChunk]:
    """Read CSV with a header line; quoted fields may contain line breaks. See `csv_delimiter` for other delimiters."""
    numbered: list[tuple[int, Row | RowError]] = []
    with open(path, "rb") as file, _long_csv_fields():
        reject_utf16(path, file.read(4))
        file.seek(0)
        lines = _CsvLines(path, file)
        try:
            reader = csv.reader(lines, strict=True, delimiter=csv_delimiter(path))
            header = next(reader, [])
            start, line = file.tell(), reader.line_num
            for values in reader:
                lines.row_bytes = 0
                if values:
                    numbered.append((line + 1, _csv_row(header, values)))
                line = reader.line_num
                if file.tell() - start >= _CHUNK_BYTES:
                    yield RowChunk(str(path), file.tell() - start, numbered)
                    numbered, start = [], file.tell()
        except csv.Error as err:
            raise DataError(
                f"The file is not valid CSV: {err}.",
                where=f"{path}, line {lines.number}",
                fix="Quote fields that contain commas, quotes or line breaks, and double the quotes inside them.",
            ) from err
        yield RowChunk(str(path), file.tell() - start, numbered)


def _csv_row(header: list[str], values: list[str]) -> Row | RowError:
    if len(values) != len(header):
        return RowError(f"expected {len(header)} fields ({join_names(header)}), found {len(values)}")
    return dict(zip(header, values, strict=True))


class _CsvLines:
    """Decoded lines of a CSV file, with the size of the current row: an open quote joins many lines into one row."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._offset = 0
        self.number = 0
        self.row_bytes = 0

    def __iter__(self) -> Iterator[str]:
        while line := self._file.readline(MAX_ROW_BYTES + 1):
            self.number += 1
            self.row_bytes += len(line)
            if self.row_bytes > MAX_ROW_BYTES:
                raise row_too_long(f"{self._path}, line {self.number}")
            try:
                yield line.decode("utf-8-sig" if self.number == 1 else "utf-8")
            except UnicodeDecodeError as err:
                raise _encoding_error(self._path, self.number, _not_utf8(err, self._offset)) from err
            self._offset += len(line)


@contextlib.contextmanager
def _long_csv_fields() -> Iterator[None]:
    """Raise the csv module's 128 KiB field limit, which is process-wide."""
    before = csv.field_size_limit(MAX_ROW_BYTES)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _parse_line(line: str) -> Row | RowError:
    try:
        value = json.loads(line)
    except RecursionError:
        return _too_deep()
    except ValueError as err:
        reason = err.msg if isinstance(err, json.JSONDecodeError) else str(err)
        return RowError(f"expected a JSON object, found {short_repr(line)} (not JSON: {reason})")
    return _as_row(value)


def _as_row(value: object) -> Row | RowError:
    if too_deep(value):
        return _too_deep()
    return value if isinstance(value, dict) else RowError(f"expected a JSON object, found {describe(value)}")


def _too_deep() -> RowError:
    return RowError(f"expected at most {MAX_NESTING} levels of lists and objects, found more")


def _not_utf8(err: UnicodeDecodeError, offset: int) -> str:
    return f"expected UTF-8 text, found byte 0x{err.object[err.start]:02x} at byte offset {offset + err.start}"


def _encoding_error(path: Path, line: int, problem: str) -> DataError:
    return DataError(
        f"The file is not UTF-8: {problem}.", where=f"{path}, line {line}", fix="Save the file as UTF-8 text."
    )


def reject_utf16(path: Path, start: bytes) -> None:
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(
            "The file is UTF-16, not UTF-8 (byte offset 0 holds a UTF-16 byte order mark).",
            where=f"{path}, line 1",
            fix="Save the file as UTF-8 text.",
        )
