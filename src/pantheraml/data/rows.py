"""Rows of source files with their location, and helpers to show data in error messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Row = dict[str, Any]
Unit = Literal["line", "row"]

_SHOWN_CHARACTERS = 60
MAX_NAMES = 12


@dataclass(frozen=True)
class BadRow:
    """An invalid row: its location, the wrong field, and what was expected there."""

    file: str
    unit: Unit
    number: int
    field: str | None
    problem: str
    fix: str | None = None
    """How to fix it, unless by correcting the row."""

    def where(self) -> str:
        place = f"{self.file}, {self.unit} {self.number}"
        return f"{place}, field `{self.field}`" if self.field else place


class RowError(Exception):
    """Raised while reading or encoding a single row; callers that know its location convert it to a BadRow."""

    def __init__(self, problem: str, field: str | None = None, *, fix: str | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.field = field
        self.fix = fix


class Chunk(Protocol):
    """A part of a source file, the unit of work of one process; cheap to send to another process."""

    @property
    def file(self) -> str: ...

    @property
    def unit(self) -> Unit: ...

    @property
    def size(self) -> int:
        """Size of the chunk in bytes of the source file, for progress."""
        ...

    def rows(self) -> Iterator[tuple[int, Row | RowError]]:
        """Yield each row, or its error, with its number (counted from 1)."""
        ...


def short_repr(value: object) -> str:
    """Return the repr of a value, shortened for error messages."""
    text = repr(value)
    if len(text) > _SHOWN_CHARACTERS:
        text = f"{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)"
    return text


def excerpt(text: str, characters: int = 200) -> str:
    """Return the start of untrusted text on one line, with non-printable characters escaped."""
    start = text[:characters] + ("..." if len(text) > characters else "")
    return "".join(mark if mark.isprintable() else ascii(mark)[1:-1] for mark in start)


def join_names(columns: Iterable[object], quote: str = "") -> str:
    """Join names from the data, shortened for an error or a notice."""
    first = [
        f"{quote}{excerpt(str(name), _SHOWN_CHARACTERS)}{quote}" for name in itertools.islice(columns, MAX_NAMES + 1)
    ]
    return ", ".join(first[:MAX_NAMES] + ["..."] * (len(first) > MAX_NAMES))


def describe(value: object) -> str:
    """Describe a value by its JSON type, for error messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"the boolean {short_repr(value).lower()}"
    if isinstance(value, int | float):
        return f"the number {short_repr(value)}"
    if isinstance(value, str):
        return f"the string {short_repr(value)}"
    if isinstance(value, list):
        return f"the list {short_repr(value)}"
    if isinstance(value, dict):
        return f"the object {short_repr(value)}"
    return f"{type(value).__name__} {short_repr(value)}"


def reject_surrogates(value: str, name: str) -> None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as err:
        code = ord(value[err.start])
        raise RowError(f"expected Unicode text, found half a surrogate pair (\\u{code:04x})", name) from err


def filled_columns(row: Row) -> Iterator[str]:
    """Yield the non-empty columns of a row."""
    return (str(name) for name, value in row.items() if value is not None and value != "" and value != [])
