"""DatasetBuild prepared data from tokenized chunks; invalid rows stop the build or are skipped and counted.

The train and eval splits are written in one pass and committed to the cache together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pantheraml.base.errors import DataError
from pantheraml.base.events import Emit, WarningIssued
from pantheraml.base.folders import committed_folder
from pantheraml.data.row_formats import first_unused_columns
from pantheraml.data.rows import BadRow
from pantheraml.data.token_store import DatasetMeta, DatasetWriter
from pantheraml.data.tokenize import ChunkResult, Recipe, SplitName

_SHOWN_BAD_ROWS = 5


@dataclass
class _Counts:
    """Row counts over all chunks."""

    rows: dict[SplitName, int] = field(default_factory=lambda: {"train": 0, "eval": 0})
    truncated: dict[SplitName, int] = field(default_factory=lambda: {"train": 0, "eval": 0})
    no_target: dict[SplitName, int] = field(default_factory=lambda: {"train": 0, "eval": 0})
    empty: dict[SplitName, int] = field(default_factory=lambda: {"train": 0, "eval": 0})
    columns: dict[str, None] = field(default_factory=dict)
    bad: int = 0
    shown: list[BadRow] = field(default_factory=list)

    def add(self, result: ChunkResult) -> None:
        for split, part in result.splits.items():
            self.rows[split] += part.rows
            self.truncated[split] += part.truncated_rows
            self.no_target[split] += part.no_target_rows
            self.empty[split] += part.empty_rows
        self.columns |= result.columns
        self.bad += len(result.bad_rows)
        self.shown.extend(result.bad_rows[: _SHOWN_BAD_ROWS - len(self.shown)])


@dataclass(frozen=True)
class DatasetBuild:
    """One pass over the sources: its settings and outputs."""

    recipe: Recipe
    packing: bool
    pad_id: int
    tokenizer: str
    """Class name, for errors."""
    on_bad_row: Literal["stop", "skip"]
    targets: Mapping[SplitName, Path]
    """Output folder of each split; its name is the fingerprint."""
    emit: Emit
    files: Sequence[str] = ()
    """Source files, in order."""

    def run(self, results: Iterable[ChunkResult]) -> None:
        """Write all splits; they are committed together, after the last row was validated."""
        counts, numbers = _Counts(), {file: number for number, file in enumerate(self.files)}
        with contextlib.ExitStack() as stack:
            writers = {
                split: stack.enter_context(
                    DatasetWriter(
                        stack.enter_context(committed_folder(folder, private=True)),
                        seq_len=self.recipe.seq_len,
                        packed=self.packing,
                    )
                )
                for split, folder in self.targets.items()
            }
            for result in results:
                self._raise_on_rejected(result)
                counts.add(result)
                for split, writer in writers.items():
                    writer.add(result.splits[split].documents, numbers.get(result.file, 0))
            for split, writer in writers.items():
                self._require_rows(split, counts)
                writer.finish(self._meta(split, counts))
        self._report(counts)

    def _raise_on_rejected(self, result: ChunkResult) -> None:
        if result.bad_rows and self.on_bad_row == "stop":
            raise bad_row_error(result.bad_rows)
        if result.long_row is not None:
            raise DataError(
                f"A row {result.long_row.problem}.",
                where=result.long_row.where(),
                fix="Raise data.seq_len, shorten the row, or truncate long rows: data.on_long_row=truncate.",
            )

    def _require_rows(self, split: SplitName, counts: _Counts) -> None:
        if counts.rows[split] > counts.no_target[split]:
            return
        if counts.empty[split] and counts.empty[split] == counts.no_target[split]:
            raise DataError(
                f"None of the {counts.empty[split]} {split} rows has a token that bears loss: the loaded tokenizer, a "
                f"{self.tokenizer}, produces no tokens for the text to learn.",
                fix="Check that model.tokenizer (or the model's folder) holds the tokenizer of this model, with its "
                "tokenizer.json, and that its chat template renders assistant messages.",
            )
        if counts.no_target[split]:
            raise DataError(
                f"None of the {counts.no_target[split]} {split} rows has a token that bears loss within data.seq_len="
                f"{self.recipe.seq_len} tokens.",
                fix="Raise data.seq_len.",
            )
        if sum(counts.rows.values()):
            raise DataError(
                f"data.eval_fraction={self.recipe.eval_fraction} leaves no rows for {split} "
                f"out of {sum(counts.rows.values())}.",
                fix="Choose another data.eval_fraction, or give evaluation data with data.eval_path.",
            )
        if counts.bad:
            first = counts.shown[0]
            raise DataError(
                f"None of the {counts.bad} rows can be used. The first one: {first.problem}.",
                where=first.where(),
                fix=first.fix or "Check the file, and data.format if it is set.",
            )
        raise no_rows_error()

    def _meta(self, split: SplitName, counts: _Counts) -> DatasetMeta:
        bad = counts.bad if split == self.recipe.split else 0  # unreadable rows count for the main split
        return DatasetMeta(
            fingerprint=self.targets[split].name,
            format=self.recipe.format,
            seq_len=self.recipe.seq_len,
            packed=self.packing,
            pad_id=self.pad_id,
            rows=counts.rows[split] - counts.no_target[split],
            skipped_rows=bad + counts.no_target[split],
            truncated_rows=counts.truncated[split],
            unused_columns=first_unused_columns(self.recipe.format, counts.columns),
        )

    def _report(self, counts: _Counts) -> None:
        if counts.bad:
            examples = "; ".join(f"{bad.where()}: {bad.problem}" for bad in counts.shown)
            self.emit(WarningIssued(message=f"{counts.bad} invalid rows are skipped, such as: {examples}"))
        empty = sum(counts.empty.values())
        if empty:
            self.emit(
                WarningIssued(
                    message=f"{empty} rows are skipped: the tokenizer, a {self.tokenizer}, "
                    "gives no token that bears loss",
                )
            )
        no_target = sum(counts.no_target.values()) - empty
        if no_target:
            self.emit(
                WarningIssued(
                    message=f"{no_target} rows are skipped: no token bears loss within data.seq_len="
                    f"{self.recipe.seq_len} tokens",
                )
            )


def bad_row_error(bad_rows: list[BadRow], *, can_skip: bool = True) -> DataError:
    """Describe the first bad row in full, and the next few briefly."""
    first, *others = bad_rows
    what = f"A row cannot be used: {first.problem}."
    for bad in others[: _SHOWN_BAD_ROWS - 1]:
        what += f"\n  also {bad.unit} {bad.number}{f', field `{bad.field}`' if bad.field else ''}: {bad.problem}"
    if len(others) >= _SHOWN_BAD_ROWS:
        what += f"\n  and {len(others) - _SHOWN_BAD_ROWS + 1} more close by"
    if first.fix is not None:
        return DataError(what, where=first.where(), fix=first.fix)
    skip = ", or skip such rows: data.on_bad_row=skip (--on-bad-row skip)" if can_skip else ""
    return DataError(what, where=first.where(), fix=f"Correct the data{skip}.")


def no_rows_error() -> DataError:
    return DataError("The data holds no rows.", fix="Check how it was written.")
