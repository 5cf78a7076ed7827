"""Rows of source files, and where each one stands, so that an error can name its place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Row = dict[str, Any]
Unit = Literal["line", "row"]

_SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used: where it stands, which field is wrong, and what was expected there."""

    file: str
    unit: Unit
    number: int
    field: str | None
    problem: str

    def where(self) -> str:
        place = f"{self.file}, {self.unit} {self.number}"
        return f"{place}, field `{self.field}`" if self.field else place


class RowError(Exception):
    """Raised while a single row is read or encoded; whoever knows the row's place turns it into a BadRow."""

    def __init__(self, problem: str, field: str | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.field = field


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
