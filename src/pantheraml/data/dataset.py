"""TokenDataset: memory-mapped prepared data, so that opening is cheap and the ranks of a node share one copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pantheraml.base.errors import DataError
from pantheraml.data.documents import NO_LOSS, Ints, TokenSequence, loss_mask
from pantheraml.data.token_store import DatasetMeta, index_column, is_complete, open_table, read_meta, to_numpy

Ids = NDArray[np.integer[Any]]


class TokenDataset:
    """Map-style data set of training sequences. Only the pages of requested sequences are read."""

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
        if meta is None or not is_complete(path):
            raise DataError(
                "The prepared data is missing or damaged.", where=str(path), fix="Prepare it again: rerun the command."
            )
        return cls(meta, open_table(path))

    def __len__(self) -> int:
        return len(self._lengths)

    def target_tokens(self, ids: Ids) -> Ints:
        """Return the number of loss-bearing tokens of each sequence, from the index."""
        return self._target_tokens[ids]

    def document_places(self, index: int) -> list[tuple[int, int]]:
        """Return (source file index, row) of each document of a sequence; empty if unknown."""
        return list(zip(*(to_numpy(column[index].values).tolist() for column in self._places), strict=True))

    def sequence(self, index: int) -> TokenSequence:
        tokens, document_lengths, runs = (to_numpy(column[index].values) for column in self._columns)
        labels = np.where(loss_mask(runs, len(tokens)), tokens, np.int32(NO_LOSS))
        return TokenSequence(tokens, labels, document_lengths)
