"""TokenDataset: prepared data as the engine reads it, memory-mapped, so opening is cheap and ranks share one copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pantheraml.base.errors import DataError
from pantheraml.data.documents import NO_LOSS, Ints, TokenSequence, loss_mask
from pantheraml.data.store import DatasetMeta, index_column, is_whole, numbers, open_table, read_meta

Ids = NDArray[np.integer[Any]]


class TokenDataset:
    """Sequences by number. Only the pages of the sequences that are asked for are read."""

    def __init__(self, meta: DatasetMeta, table: Any) -> None:
        self.fingerprint = meta.fingerprint
        self.format = meta.format
        self.seq_len = meta.seq_len
        self.packed = meta.packed
        self.pad_id = meta.pad_id
        self.tokens = meta.tokens
        self.largest_token = meta.largest_token
        self.longest_document = meta.longest_document
        self._columns = [table.column(name) for name in ("tokens", "document_lengths", "loss_runs")]
        places = ("document_files", "document_rows")
        self._places = [table.column(name) for name in places if name in table.column_names]
        self._lengths: Ints = index_column(table, "length")
        self._target_tokens: Ints = index_column(table, "target_tokens")

    @classmethod
    def open(cls, path: Path) -> TokenDataset:
        meta = read_meta(path)
        if meta is None or not is_whole(path):
            raise DataError(
                "The prepared data is missing or damaged.", where=str(path), todo="Prepare it again: rerun the command."
            )
        return cls(meta, open_table(path))

    def __len__(self) -> int:
        return len(self._lengths)

    def target_tokens(self, ids: Ids) -> Ints:
        """Loss-bearing tokens of each sequence, from the index."""
        return self._target_tokens[ids]

    def document_places(self, index: int) -> list[tuple[int, int]]:
        """Of each document of a sequence: the number of its source file, and the row there; empty: not known."""
        return list(zip(*(numbers(column[index].values).tolist() for column in self._places), strict=True))

    def sequence(self, index: int) -> TokenSequence:
        tokens, document_lengths, runs = (numbers(column[index].values) for column in self._columns)
        labels = np.where(loss_mask(runs, len(tokens)), tokens, np.int32(NO_LOSS))
        return TokenSequence(tokens, labels, document_lengths)
