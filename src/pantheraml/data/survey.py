"""Inspect the first rows before tokenization: detect their format, and warn about parts the model will not learn.

This runs even if the tokens come from the cache, so that its notices and warnings appear in every run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pantheraml.base.errors import DataError
from pantheraml.base.events import Emit, Notice, WarningIssued
from pantheraml.data import row_formats
from pantheraml.data.chat import ChatEncoder
from pantheraml.data.documents import loss_mask
from pantheraml.data.render import chat_template, text_length
from pantheraml.data.rows import BadRow, Chunk, Row, RowError, filled_columns, join_names
from pantheraml.data.token_writer import bad_row_error, no_rows_error

_ROWS = 100
_CHUNKS = 8  # a row may be as long as a chunk
_CONVERSATIONS = 8  # rendered to check how their turns end
_CHARACTERS = 100_000  # maximum length of each
_TAIL = 4  # tokens at the end of a turn to search for the end token: templates put line breaks after it


class Survey:
    """The first rows of one data path."""

    def __init__(self, chunks: Iterable[Chunk], path: Path, split: str, emit: Emit) -> None:
        self._path = path
        self._split = split
        self._emit = emit
        self._reported: set[str] = set()
        self._rows: list[Row] = []
        self._first_bad: BadRow | None = None
        for chunk, number, row in itertools.islice(_numbered(itertools.islice(chunks, _CHUNKS)), _ROWS):
            if isinstance(row, RowError):
                self._first_bad = self._first_bad or BadRow(chunk.file, chunk.unit, number, row.field, row.problem)
            else:
                self._rows.append(row)

    def format(self) -> str:
        """Detect the format from the first row that has all columns of one."""
        detected = next((name for row in self._rows if (name := row_formats.detect(row)) is not None), None)
        if detected is not None:
            used = " + ".join(f"`{name}`" for name in row_formats.COLUMNS[detected])
            self._emit(Notice(message=f"{self._split} data: format `{detected}`, detected from the columns {used}"))
            return detected
        columns = dict.fromkeys(str(name) for row in self._rows for name in row)
        if columns:
            raise DataError(
                f"The data has no usable columns. Found: {join_names(columns, '`')}. Accepted: {row_formats.ACCEPTED}.",
                where=str(self._path),
                fix="Rename the columns.",
            )
        if self._first_bad is not None:
            raise bad_row_error([self._first_bad], can_skip=False)
        raise no_rows_error()

    def report(self, format: str, tokenizer: Any) -> None:
        """Warn about parts of the first rows that the model will not learn, and free them."""
        columns = dict.fromkeys(name for row in self._rows for name in filled_columns(row))
        self.report_unused(format, columns)
        if format == "messages":
            if "tools" in columns and "tools" not in tokenizer.get_chat_template(tools=[]):
                self._warn("the tokenizer's chat template does not render tools: the model does not see `tools`")
            self._warn_without_end(tokenizer)
        self._rows.clear()

    def report_unused(self, format: str, columns: Iterable[str]) -> None:
        """Report unused columns, each once."""
        talk, others = row_formats.unused_columns(format, (name for name in columns if name not in self._reported))
        self._reported.update(talk, others)
        if talk:
            self._warn(f"format `{format}` does not use {join_names(talk, '`')}: the model does not learn from them")
        if others:
            self._emit(Notice(message=f"{self._split} data: unused columns: {join_names(others, '`')}"))

    def _warn_without_end(self, tokenizer: Any) -> None:
        """Warn if no turn ends with an end token that bears loss: only those teach the model to stop."""
        chat_template(tokenizer)  # raises if there is none
        short = (row for row in self._rows if text_length(row) < _CHARACTERS)
        rows = [row for row in map(_checked_messages, itertools.islice(short, _CONVERSATIONS)) if row is not None]
        encoded = [each for each in ChatEncoder(tokenizer).encode(rows) if not isinstance(each, RowError)]
        ends = _end_tokens(tokenizer)
        targets = [tokens[loss_mask(runs, len(tokens))] for tokens, runs in encoded]
        if targets and not any(np.isin(tokens[-_TAIL:], ends).any() for tokens in targets):
            self._warn(
                "the assistant turns have no end token that bears loss: the model does not learn where to stop. "
                "Check the chat template: the end of a turn belongs inside its {% generation %} marks, and must be a "
                "special token of this tokenizer"
            )

    def _warn(self, message: str) -> None:
        self._emit(WarningIssued(message=f"{self._split} data: {message}"))


def _numbered(chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, int, Row | RowError]]:
    for chunk in chunks:
        for number, row in chunk.rows():
            yield chunk, number, row


def _checked_messages(row: Row) -> Row | None:
    try:
        return row_formats.validate_row("messages", row)
    except RowError:
        return None  # reported with its location when all rows are read


def _end_tokens(tokenizer: Any) -> list[int]:
    """Return the end-of-sequence token and other special tokens that may end a turn."""
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends = special - {tokenizer.bos_token_id, tokenizer.unk_token_id} | {tokenizer.eos_token_id}
    return [token for token in ends if token is not None]
