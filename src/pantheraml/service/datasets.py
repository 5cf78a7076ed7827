"""Check an uploaded training file: every row, with the line and the reason of the first wrong one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pantheraml.base.errors import DataError
from pantheraml.base.text import printable
from pantheraml.data import row_formats
from pantheraml.data.chunks import read_lines
from pantheraml.data.rows import RowError


@dataclass(frozen=True)
class Dataset:
    rows: int
    format: str


def check_jsonl(path: Path) -> Dataset:
    """Return what the file holds. DataError if a row is wrong, or the rows have no format that can be trained on."""
    rows, format = 0, None
    for chunk in read_lines(path, plain=False):
        for number, row in chunk.rows():
            if isinstance(row, RowError):
                raise _wrong(number, row)
            format = format or row_formats.detect(row)
            if format is None:
                columns = ", ".join(f"`{printable(str(name))[:40]}`" for name in list(row)[:12])
                raise DataError(f"Line {number}: found the fields {columns}; expected {row_formats.ACCEPTED}.")
            try:
                row_formats.validate_row(format, row)
            except RowError as err:
                raise _wrong(number, err) from err
            rows += 1
    if format is None:
        raise DataError("The file has no rows.")
    return Dataset(rows, format)


def _wrong(number: int, err: RowError) -> DataError:
    field = f", field `{err.field}`" if err.field else ""
    return DataError(printable(f"Line {number}{field}: {err.problem}."))
