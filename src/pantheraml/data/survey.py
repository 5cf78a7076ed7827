"""What the first rows of the data show before any is tokenized: their format, and what of them will not be learnt.

This is done in every run, so that what it says is said also where the tokens come from the cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pantheraml.base.errors import DataError
from pantheraml.base.events import Emit
from pantheraml.data import formats
from pantheraml.data.build import bad_row_error, no_rows_error
from pantheraml.data.chat import ChatEncoder
from pantheraml.data.documents import loss_mask
from pantheraml.data.render import characters, chat_template
from pantheraml.data.rows import BadRow, Chunk, Row, RowError, filled_columns, names

_ROWS = 100
_CHUNKS = 8  # a row may be as long as a chunk
_CONVERSATIONS = 8  # that are rendered to see how their turns end
_CHARACTERS = 100_000  # of each
_TAIL = 4  # tokens at the end of a turn among which the end token stands: templates put line ends behind it


class Survey:
    """The first rows of one data path."""

    def __init__(self, chunks: Iterable[Chunk], path: Path, side: str, emit: Emit) -> None:
        self._path = path
        self._side = side
        self._emit = emit
        self._told: set[str] = set()
        self._rows: list[Row] = []
        self._first_bad: BadRow | None = None
        for chunk, number, row in itertools.islice(_numbered(itertools.islice(chunks, _CHUNKS)), _ROWS):
            if isinstance(row, RowError):
                self._first_bad = self._first_bad or BadRow(chunk.file, chunk.unit, number, row.field, row.problem)
            else:
                self._rows.append(row)

    def format(self) -> str:
        """The format of the first row that has all columns of one."""
        found = next((name for row in self._rows if (name := formats.detect(row)) is not None), None)
        if found is not None:
            used = " + ".join(f"`{name}`" for name in formats.COLUMNS[found])
            self._emit("notice", message=f"{self._side} data: format `{found}`, detected from the columns {used}")
            return found
        columns = dict.fromkeys(str(name) for row in self._rows for name in row)
        if columns:
            raise DataError(
                f"The data has no usable columns. Found: {names(columns, '`')}. Accepted: {formats.ACCEPTED}.",
                where=str(self._path),
                todo="Rename the columns.",
            )
        if self._first_bad is not None:
            raise bad_row_error([self._first_bad], can_skip=False)
        raise no_rows_error()

    def tell(self, format: str, tokenizer: Any) -> None:
        """Say what of the first rows will not be learnt, and forget them."""
        columns = dict.fromkeys(name for row in self._rows for name in filled_columns(row))
        self.tell_unread(format, columns)
        if format == "messages":
            if "tools" in columns and "tools" not in tokenizer.get_chat_template(tools=[]):
                self._warn(
                    "the tokenizer's chat template does not write tools: the model does not see those of `tools`"
                )
            self._warn_without_end(tokenizer)
        self._rows.clear()

    def tell_unread(self, format: str, columns: Iterable[str]) -> None:
        """Name columns that are not used, each once."""
        talk, others = formats.unread(format, (name for name in columns if name not in self._told))
        self._told.update(talk, others)
        if talk:
            self._warn(
                f"format `{format}` does not use {names(talk, '`')}: the model does not learn from what stands there"
            )
        if others:
            self._emit("notice", message=f"{self._side} data: columns that are not used: {names(others, '`')}")

    def _warn_without_end(self, tokenizer: Any) -> None:
        """A model learns to stop only from end tokens that bear loss."""
        chat_template(tokenizer)  # refuses a tokenizer without one
        short = (row for row in self._rows if characters(row) < _CHARACTERS)
        rows = [row for row in map(_checked_messages, itertools.islice(short, _CONVERSATIONS)) if row is not None]
        encoded = [each for each in ChatEncoder(tokenizer).encode(rows) if not isinstance(each, RowError)]
        ends = _end_tokens(tokenizer)
        learnt = [tokens[loss_mask(runs, len(tokens))] for tokens, runs in encoded]
        if learnt and not any(np.isin(tokens[-_TAIL:], ends).any() for tokens in learnt):
            self._warn(
                "the part of the conversations that is learnt ends without an end token: the model does not learn "
                "where to stop. Check the chat template: what ends a turn belongs within its {% generation %} marks, "
                "and must be a special token of this tokenizer"
            )

    def _warn(self, message: str) -> None:
        self._emit("warning", message=f"{self._side} data: {message}")


def _numbered(chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, int, Row | RowError]]:
    for chunk in chunks:
        for number, row in chunk.rows():
            yield chunk, number, row


def _checked_messages(row: Row) -> Row | None:
    try:
        return formats.checked("messages", row)
    except RowError:
        return None  # reported with its place when all rows are read


def _end_tokens(tokenizer: Any) -> list[int]:
    """The end-of-sequence token, and special tokens that may end a turn."""
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends = special - {tokenizer.bos_token_id, tokenizer.unk_token_id} | {tokenizer.eos_token_id}
    return [token for token in ends if token is not None]
