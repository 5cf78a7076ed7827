"""Tokenize a chunk: validate every row, encode the valid ones and assign each to a split.

This is what runs in parallel. The result depends on the chunk and the recipe only, so the number of processes does not
matter.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Literal

from pantheraml.data.documents import Documents, truncate_runs
from pantheraml.data.formats import Encoder
from pantheraml.data.row_formats import validate_row
from pantheraml.data.rows import BadRow, Chunk, Row, RowError, filled_columns

SplitName = Literal["train", "eval"]


@dataclass(frozen=True)
class Recipe:
    """Tokenization settings: everything besides the tokenizer that decides how rows become documents."""

    format: str
    seq_len: int
    on_long_row: Literal["truncate", "stop"]
    eval_fraction: float
    split: SplitName
    """Split of the rows that eval_fraction does not hold out."""


@dataclass
class SplitResult:
    """Documents and row counts of one split."""

    documents: Documents = field(default_factory=Documents)
    rows: int = 0
    truncated_rows: int = 0
    no_target_rows: int = 0
    """Rows skipped because no token within seq_len bears loss."""
    empty_rows: int = 0
    """Those of them that fit seq_len: the tokenizer gives no token for the text to learn."""


@dataclass
class ChunkResult:
    size: int
    file: str = ""
    splits: dict[SplitName, SplitResult] = field(
        default_factory=lambda: {"train": SplitResult(), "eval": SplitResult()}
    )
    columns: dict[str, None] = field(default_factory=dict)
    """Non-empty columns, in order of appearance."""
    bad_rows: list[BadRow] = field(default_factory=list)
    long_row: BadRow | None = None
    """First row that is too long, with on_long_row=stop."""


class ChunkTokenizer:
    """Callable that tokenizes chunks; created once, before the workers fork."""

    def __init__(self, recipe: Recipe, tokenizer: Any) -> None:
        self._recipe = recipe
        self._encoder = Encoder(recipe.format, tokenizer)

    def __call__(self, chunk: Chunk) -> ChunkResult:
        result = ChunkResult(chunk.size, chunk.file)
        good: list[tuple[int, Row]] = []

        def reject(number: int, err: RowError) -> None:
            result.bad_rows.append(BadRow(chunk.file, chunk.unit, number, err.field, err.problem, err.fix))

        for number, row in chunk.rows():
            try:
                if isinstance(row, RowError):
                    raise row
                result.columns.update(dict.fromkeys(filled_columns(row)))
                good.append((number, validate_row(self._recipe.format, row)))
            except RowError as err:
                reject(number, err)
        encoded = self._encoder.encode([fields for _, fields in good]) if good else []
        for (number, fields), document in zip(good, encoded, strict=True):
            if isinstance(document, RowError):
                reject(number, document)
                continue
            tokens, runs = document
            split = result.splits[self._split(fields)]
            split.rows += 1
            truncated = len(tokens) > self._recipe.seq_len
            if truncated:
                if self._recipe.on_long_row == "stop" and result.long_row is None:
                    problem = f"has {len(tokens)} tokens, but data.seq_len is {self._recipe.seq_len}"
                    result.long_row = BadRow(chunk.file, chunk.unit, number, None, problem)
                split.truncated_rows += 1
                tokens = tokens[: self._recipe.seq_len].copy()  # a view would keep the whole row in memory
                runs = truncate_runs(runs, len(tokens))
            if len(runs):
                split.documents.add(tokens, runs, number)
            else:
                split.no_target_rows += 1
                split.empty_rows += not truncated
        result.bad_rows.sort(key=lambda bad: bad.number)
        return result

    def _split(self, fields: Row) -> SplitName:
        """Assign a row by a hash of its content, so that equal rows are in the same split, in any file and order."""
        if not self._recipe.eval_fraction:
            return self._recipe.split
        content = json.dumps(fields, sort_keys=True, ensure_ascii=False, default=str).encode()
        draw = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") / 2**64
        return "eval" if draw < self._recipe.eval_fraction else self._recipe.split
