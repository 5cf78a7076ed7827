"""Rows of source files, and where each one stands, so that an error can name its place."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Row = dict[str, Any]
Unit = Literal["line", "row"]

_SHOWN_CHARACTERS = 60
MOST_NAMES = 12


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used: where it stands, which field is wrong, and what was expected there."""

    file: str
    unit: Unit
    number: int
    field: str | None
    problem: str
    todo: str | None = None
    """What to do about it, where that is not to correct the row."""

    def where(self) -> str:
        place = f"{self.file}, {self.unit} {self.number}"
        return f"{place}, field `{self.field}`" if self.field else place


class RowError(Exception):
    """Raised while a single row is read or encoded; whoever knows the row's place turns it into a BadRow."""

    def __init__(self, problem: str, field: str | None = None, *, todo: str | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.field = field
        self.todo = todo


class Chunk(Protocol):
    """A piece of a source file that one process handles at a time; cheap to send to another process."""

    @property
    def file(self) -> str: ...

    @property
    def unit(self) -> Unit: ...

    @property
    def size(self) -> int:
        """Bytes of the source file that this chunk stands for, for progress."""
        ...

    def rows(self) -> Iterator[tuple[int, Row | RowError]]:
        """Each row with its number (counted from 1), or what is wrong with it."""
        ...


def shown(value: object) -> str:
    """A value as an error message shows it: its JSON-like form, shortened."""
    text = repr(value)
    if len(text) > _SHOWN_CHARACTERS:
        text = f"{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)"
    return text


def brief(text: str, characters: int = 200) -> str:
    """Words of a file or a template on one short line, as a terminal can show them."""
    start = text[:characters] + ("..." if len(text) > characters else "")
    return "".join(mark if mark.isprintable() else ascii(mark)[1:-1] for mark in start)


def names(columns: Iterable[object], quote: str = "") -> str:
    """Names that the data gives, shortened to what an error or a notice can hold."""
    first = [
        f"{quote}{brief(str(name), _SHOWN_CHARACTERS)}{quote}" for name in itertools.islice(columns, MOST_NAMES + 1)
    ]
    return ", ".join(first[:MOST_NAMES] + ["..."] * (len(first) > MOST_NAMES))


def kind_of(value: object) -> str:
    """What a value is, in the words of JSON."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"the boolean {shown(value).lower()}"
    if isinstance(value, int | float):
        return f"the number {shown(value)}"
    if isinstance(value, str):
        return f"the string {shown(value)}"
    if isinstance(value, list):
        return f"the list {shown(value)}"
    if isinstance(value, dict):
        return f"the object {shown(value)}"
    return f"{type(value).__name__} {shown(value)}"


def refuse_surrogates(value: str, name: str) -> None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as err:
        code = ord(value[err.start])
        raise RowError(f"expected Unicode text, found half a surrogate pair (\\u{code:04x})", name) from err


def filled_columns(row: Row) -> Iterator[str]:
    """Columns of a row that hold something."""
    return (str(name) for name, value in row.items() if value is not None and value != "" and value != [])
