"""TokenDataset: memory-mapped prepared data, so that opening is cheap and the ranks of a node share one copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pantheraml.data.data_folder import DataFolder, unusable
from pantheraml.data.documents import NO_LOSS, Ints, TokenSequence, loss_mask
from pantheraml.data.token_store import DatasetMeta, index_column, to_numpy

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
    def open(cls, path: Path, *, untrusted: bool = False) -> TokenDataset:
        """Open prepared data of this user. `untrusted`: it came with a received run folder; all of it is checked, since
        Arrow trusts lengths and offsets, which an attacker may have written."""
        try:
            with DataFolder(path) as folder:
                if untrusted:
                    folder.table().validate(full=True)
                meta = folder.meta()
                if meta is not None and meta.fingerprint == path.name and folder.is_complete():
                    return cls(meta, folder.table())
        except (OSError, ValueError, pa.ArrowException) as err:
            raise unusable(path, err) from err
        raise unusable(path)

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
