"""Building prepared data: tokenised chunks go into the writers; rows that cannot be used stop it or are counted.

Both sides of a split are written in one pass and take their place in the cache together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pantheraml.base.errors import DataError
from pantheraml.base.events import Emit
from pantheraml.base.folders import committed_folder
from pantheraml.data.formats import first_unread
from pantheraml.data.rows import BadRow
from pantheraml.data.store import DatasetMeta, DatasetWriter
from pantheraml.data.tokenise import ChunkResult, Recipe, Side

_SHOWN_BAD_ROWS = 5


@dataclass
class _Counts:
    """What became of the rows, over all chunks."""

    rows: dict[Side, int] = field(default_factory=lambda: {"train": 0, "eval": 0})
    truncated: dict[Side, int] = field(default_factory=lambda: {"train": 0, "eval": 0})
    barren: dict[Side, int] = field(default_factory=lambda: {"train": 0, "eval": 0})
    empty: dict[Side, int] = field(default_factory=lambda: {"train": 0, "eval": 0})
    columns: dict[str, None] = field(default_factory=dict)
    bad: int = 0
    shown: list[BadRow] = field(default_factory=list)

    def add(self, result: ChunkResult) -> None:
        for side, part in result.sides.items():
            self.rows[side] += part.rows
            self.truncated[side] += part.truncated_rows
            self.barren[side] += part.barren_rows
            self.empty[side] += part.empty_rows
        self.columns |= result.columns
        self.bad += len(result.bad_rows)
        self.shown.extend(result.bad_rows[: _SHOWN_BAD_ROWS - len(self.shown)])


@dataclass(frozen=True)
class Build:
    """One pass over the sources: what it makes, and how strict it is."""

    recipe: Recipe
    packing: bool
    pad_id: int
    tokenizer: str
    """Its class, for errors."""
    on_bad_row: Literal["stop", "skip"]
    targets: Mapping[Side, Path]
    """The folder that each side is written to; its name is the fingerprint."""
    emit: Emit
    files: Sequence[str] = ()
    """The sources, in their order."""

    def run(self, results: Iterable[ChunkResult]) -> None:
        """Write every side; all of them take their place together, after the last row was checked."""
        counts, numbers = _Counts(), {file: number for number, file in enumerate(self.files)}
        with contextlib.ExitStack() as stack:
            writers = {
                side: stack.enter_context(
                    DatasetWriter(
                        stack.enter_context(committed_folder(folder, private=True)),
                        seq_len=self.recipe.seq_len,
                        packed=self.packing,
                    )
                )
                for side, folder in self.targets.items()
            }
            for result in results:
                self._stop_where_asked(result)
                counts.add(result)
                for side, writer in writers.items():
                    writer.add(result.sides[side].documents, numbers.get(result.file, 0))
            for side, writer in writers.items():
                self._refuse_nothing(side, counts)
                writer.finish(self._meta(side, counts))
        self._tell(counts)

    def _stop_where_asked(self, result: ChunkResult) -> None:
        if result.bad_rows and self.on_bad_row == "stop":
            raise bad_row_error(result.bad_rows)
        if result.long_row is not None:
            raise DataError(
                f"A row {result.long_row.problem}.",
                where=result.long_row.where(),
                todo="Raise data.seq_len, shorten the row, or have long rows cut: data.on_long_row=truncate.",
            )

    def _refuse_nothing(self, side: Side, counts: _Counts) -> None:
        if counts.rows[side] > counts.barren[side]:
            return
        if counts.empty[side] and counts.empty[side] == counts.barren[side]:
            raise DataError(
                f"None of the {counts.empty[side]} {side} rows gives a single token to learn from: the tokenizer that "
                f"was loaded, a {self.tokenizer}, makes nothing of what is to be learnt.",
                todo="Check that model.tokenizer (or the model's folder) holds the tokenizer of this model, with its "
                "tokenizer.json, and that its chat template writes what the assistant says.",
            )
        if counts.barren[side]:
            raise DataError(
                f"None of the {counts.barren[side]} {side} rows has anything to learn from within data.seq_len="
                f"{self.recipe.seq_len} tokens.",
                todo="Raise data.seq_len.",
            )
        if sum(counts.rows.values()):
            raise DataError(
                f"data.eval_fraction={self.recipe.eval_fraction} leaves no rows for {side} "
                f"out of {sum(counts.rows.values())}.",
                todo="Choose another data.eval_fraction, or give evaluation data with data.eval_path.",
            )
        if counts.bad:
            first = counts.shown[0]
            raise DataError(
                f"None of the {counts.bad} rows can be used. The first one: {first.problem}.",
                where=first.where(),
                todo=first.todo or "Check the file, and data.format if it is set.",
            )
        raise no_rows_error()

    def _meta(self, side: Side, counts: _Counts) -> DatasetMeta:
        bad = counts.bad if side == self.recipe.side else 0  # a row that cannot be read belongs to no other side
        return DatasetMeta(
            fingerprint=self.targets[side].name,
            format=self.recipe.format,
            seq_len=self.recipe.seq_len,
            packed=self.packing,
            pad_id=self.pad_id,
            rows=counts.rows[side] - counts.barren[side],
            skipped_rows=bad + counts.barren[side],
            truncated_rows=counts.truncated[side],
            unread=first_unread(self.recipe.format, counts.columns),
        )

    def _tell(self, counts: _Counts) -> None:
        if counts.bad:
            examples = "; ".join(f"{bad.where()}: {bad.problem}" for bad in counts.shown)
            self.emit("warning", message=f"{counts.bad} rows cannot be used and are skipped, such as: {examples}")
        empty = sum(counts.empty.values())
        if empty:
            self.emit(
                "warning",
                message=f"{empty} rows are left out: the tokenizer, a {self.tokenizer}, gives no token to learn from",
            )
        barren = sum(counts.barren.values()) - empty
        if barren:
            self.emit(
                "warning",
                message=f"{barren} rows are left out: they have nothing to learn from within data.seq_len="
                f"{self.recipe.seq_len} tokens",
            )


def bad_row_error(bad_rows: list[BadRow], *, can_skip: bool = True) -> DataError:
    """The first bad row in full, and the next few in short."""
    first, *others = bad_rows
    what = f"A row cannot be used: {first.problem}."
    for bad in others[: _SHOWN_BAD_ROWS - 1]:
        what += f"\n  also {bad.unit} {bad.number}{f', field `{bad.field}`' if bad.field else ''}: {bad.problem}"
    if len(others) >= _SHOWN_BAD_ROWS:
        what += f"\n  and {len(others) - _SHOWN_BAD_ROWS + 1} more close by"
    if first.todo is not None:
        return DataError(what, where=first.where(), todo=first.todo)
    skip = ", or leave such rows out: data.on_bad_row=skip (--on-bad-row skip)" if can_skip else ""
    return DataError(what, where=first.where(), todo=f"Correct the data{skip}.")


def no_rows_error() -> DataError:
    return DataError("The data holds no rows.", todo="Check how it was written.")
