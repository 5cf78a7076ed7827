"""Check every row of an uploaded training file; errors name line, field and reason."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pantheraml.base.errors import DataError
from pantheraml.base.text import printable
from pantheraml.data import row_formats
from pantheraml.data.chunks import read_lines
from pantheraml.data.rows import Row, RowError

MOST_WRONG_ROWS = 50
"""Number of invalid rows after which reading stops."""


@dataclass(frozen=True)
class Dataset:
    rows: int
    format: str


class WrongRowsError(DataError):
    """The file has invalid rows."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        first = rows[0]
        field = f", field `{first['field']}`" if first["field"] else ""
        first_of_many = "the first " if len(rows) >= MOST_WRONG_ROWS else ""
        more = "" if len(rows) == 1 else f" ({first_of_many}{len(rows)} wrong rows)"
        super().__init__(f"Line {first['line']}{field}: {first['problem']}.{more}")
        self.rows = rows


def check_jsonl(path: Path) -> Dataset:
    """Return what the file holds. DataError if rows are invalid or of an unknown format."""
    rows, format = 0, None
    wrong: list[dict[str, Any]] = []
    for chunk in read_lines(path, plain=False):
        for number, row in chunk.rows():
            try:
                if isinstance(row, RowError):
                    raise row
                format = format or _format(row)
                row_formats.validate_row(format, row)
            except RowError as err:
                wrong.append({"line": number, "field": err.field, "problem": printable(err.problem)})
                if len(wrong) >= MOST_WRONG_ROWS:
                    raise WrongRowsError(wrong) from err
            rows += 1
    if wrong:
        raise WrongRowsError(wrong)
    if format is None:
        raise DataError("The file has no rows.")
    return Dataset(rows, format)


def _format(row: Row) -> str:
    found = row_formats.detect(row)
    if found is None:
        columns = ", ".join(f"`{printable(str(name))[:40]}`" for name in list(row)[:12])
        found_fields = f"the fields {columns}" if columns else "no fields"
        raise RowError(f"found {found_fields}; expected {row_formats.ACCEPTED}", None)
    return found
