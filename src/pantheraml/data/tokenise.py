"""Tokenising a chunk: check every row, encode the good ones, put each on its side of the split.

This is what runs in parallel. A chunk's result depends on the chunk and the recipe alone, so the number of processes
changes nothing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Literal

from pantheraml.data.documents import Documents, cut_runs
from pantheraml.data.formats import Encoder, checked
from pantheraml.data.rows import BadRow, Chunk, Row, RowError, filled_columns

Side = Literal["train", "eval"]


@dataclass(frozen=True)
class Recipe:
    """Everything besides the tokenizer that decides how rows become documents."""

    format: str
    seq_len: int
    on_long_row: Literal["truncate", "stop"]
    eval_fraction: float
    side: Side
    """Where rows go that eval_fraction does not hold out."""


@dataclass
class SideResult:
    """The documents of one side of the split, and what became of its rows."""

    documents: Documents = field(default_factory=Documents)
    rows: int = 0
    truncated_rows: int = 0
    barren_rows: int = 0
    """Rows left out because none of their tokens within seq_len bears loss."""
    empty_rows: int = 0
    """Those of them that are no longer than seq_len: the tokenizer gives no token for what is to be learnt."""


@dataclass
class ChunkResult:
    size: int
    file: str = ""
    sides: dict[Side, SideResult] = field(default_factory=lambda: {"train": SideResult(), "eval": SideResult()})
    columns: dict[str, None] = field(default_factory=dict)
    """Columns in which a row has something, in the order of their appearance."""
    bad_rows: list[BadRow] = field(default_factory=list)
    long_row: BadRow | None = None
    """The first row that is too long, where long rows stop the run."""


class Tokeniser:
    """Callable on chunks; made once per process."""

    def __init__(self, recipe: Recipe, tokenizer: Any) -> None:
        self._recipe = recipe
        self._encoder = Encoder(recipe.format, tokenizer)

    def __call__(self, chunk: Chunk) -> ChunkResult:
        result = ChunkResult(chunk.size, chunk.file)
        good: list[tuple[int, Row]] = []

        def refuse(number: int, err: RowError) -> None:
            result.bad_rows.append(BadRow(chunk.file, chunk.unit, number, err.field, err.problem, err.todo))

        for number, row in chunk.rows():
            try:
                if isinstance(row, RowError):
                    raise row
                result.columns.update(dict.fromkeys(filled_columns(row)))
                good.append((number, checked(self._recipe.format, row)))
            except RowError as err:
                refuse(number, err)
        encoded = self._encoder.encode([fields for _, fields in good]) if good else []
        for (number, fields), document in zip(good, encoded, strict=True):
            if isinstance(document, RowError):
                refuse(number, document)
                continue
            tokens, runs = document
            side = result.sides[self._side(fields)]
            side.rows += 1
            cut = len(tokens) > self._recipe.seq_len
            if cut:
                if self._recipe.on_long_row == "stop" and result.long_row is None:
                    problem = f"has {len(tokens)} tokens, but data.seq_len is {self._recipe.seq_len}"
                    result.long_row = BadRow(chunk.file, chunk.unit, number, None, problem)
                side.truncated_rows += 1
                tokens = tokens[: self._recipe.seq_len].copy()  # a view would keep the whole row in memory
                runs = cut_runs(runs, len(tokens))
            if len(runs):
                side.documents.add(tokens, runs, number)
            else:
                side.barren_rows += 1
                side.empty_rows += not cut
        result.bad_rows.sort(key=lambda bad: bad.number)
        return result

    def _side(self, fields: Row) -> Side:
        """By a hash of what the row says, so that the same row is always on the same side, in any file and order."""
        if not self._recipe.eval_fraction:
            return self._recipe.side
        content = json.dumps(fields, sort_keys=True, ensure_ascii=False, default=str).encode()
        draw = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") / 2**64
        return "eval" if draw < self._recipe.eval_fraction else self._recipe.side
