"""Pad the micro-batches of a step to one shape for pipeline parallelism, whose stages agree on shapes before sending.

Rows keep their order and documents; the padding of a row, or of a whole micro-batch, has no targets and is split into
separate documents (see `batch.py`). So the sum of token losses is unchanged, and every rank that reads the same batches
computes the same shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pantheraml.data.batch import Batch, padded_cu_seqlens, padding_lengths, restarting_positions
from pantheraml.data.documents import NO_LOSS, Ints


@dataclass(frozen=True)
class UniformBatches:
    """n micro-batches: [n, B, S] LongTensors, and the attributes of `Batch` per micro-batch."""

    input_ids: Tensor
    targets: Tensor
    position_ids: Tensor
    boundaries: tuple[Tensor | None, ...]
    max_lengths: tuple[int, ...]
    target_counts: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        count, rows, width = self.input_ids.shape
        return count, rows, width

    def to(self, device: torch.device) -> UniformBatches:
        ends = (ends if ends is None else ends.to(device, non_blocking=True) for ends in self.boundaries)
        return replace(
            self,
            input_ids=self.input_ids.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
            position_ids=self.position_ids.to(device, non_blocking=True),
            boundaries=tuple(ends),
        )


def make_uniform(batches: Sequence[Batch], *, at_least: int = 1, multiple_of: int = 1) -> UniformBatches:
    """Pad all rows of `batches` (on the CPU) to the widest one, in as many micro-batches as there are batches.

    `at_least` and `multiple_of` can raise the number of micro-batches: rows are redistributed, never more per
    micro-batch than in the fullest batch, and dummy micro-batches are added.
    """
    count = -(-max(len(batches), at_least) // multiple_of) * multiple_of
    width = max(batch.input_ids.shape[1] for batch in batches)
    rows = -(-sum(len(batch.input_ids) for batch in batches) // count)
    input_ids = np.zeros((count * rows, width), dtype=np.int64)  # padding: any token works, it has no target
    targets = np.full_like(input_ids, NO_LOSS)
    documents: list[Ints] = [np.array([], dtype=np.int32)] * len(input_ids)
    place = 0
    for batch in batches:
        for row, lengths in enumerate(_document_lengths(batch)):
            filled = batch.input_ids.shape[1]
            input_ids[place, :filled] = batch.input_ids[row].numpy()
            targets[place, :filled] = batch.targets[row].numpy()
            documents[place] = lengths
            place += 1
    parts = [
        _padded_lengths(documents[first : first + rows], width, max(batch.max_length for batch in batches))
        for first in range(0, len(documents), rows)
    ]
    position_ids = np.concatenate([restarting_positions(lengths) for lengths in parts])
    shape = (count, rows, width)
    return UniformBatches(
        input_ids=torch.from_numpy(input_ids.reshape(shape)),
        targets=torch.from_numpy(targets.reshape(shape)),
        position_ids=torch.from_numpy(position_ids.reshape(shape)),
        boundaries=tuple(None if (lengths == width).all() else padded_cu_seqlens(lengths) for lengths in parts),
        max_lengths=tuple(int(lengths.max()) for lengths in parts),
        target_counts=tuple((targets.reshape(count, -1) != NO_LOSS).sum(axis=1).tolist()),
    )


def _padded_lengths(rows: Sequence[Ints], width: int, longest: int) -> Ints:
    """Return the document lengths of a micro-batch with its rows padded to `width`. Padding documents are at most as
    long as the longest one of the micro-batch, or `longest` if it has none."""
    longest = max((int(lengths.max()) for lengths in rows if len(lengths)), default=longest)
    padded = [np.append(lengths, padding_lengths(width - int(lengths.sum()), longest)) for lengths in rows]
    return np.concatenate(padded)


def _document_lengths(batch: Batch) -> list[Ints]:
    """Return the document lengths of each row."""
    rows, width = batch.input_ids.shape
    edges = np.arange(0, rows * width + 1, width)
    if batch.boundaries is not None:
        edges = np.union1d(edges, batch.boundaries.numpy())
    lengths, starts = np.diff(edges), edges[:-1]
    return [lengths[starts // width == row] for row in range(rows)]
