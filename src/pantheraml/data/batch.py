"""Collate token sequences into the tensors of one micro-batch.

Position ids restart at 0 with every document. Padding counts as separate documents, none longer than the longest real
one: a model may have no position beyond it, or compute all positions differently because of it. Without an attention
mask, transformers derives document boundaries from those restarts, so nothing attends across documents or to padding.
For variable-length attention the boundaries (cu_seqlens) are computed here, on the host, without a device sync.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from pantheraml.data.documents import NO_LOSS, Ints, TokenSequence

_WIDTH_MULTIPLE = 8  # aligned for tensor cores; also bounds the number of distinct shapes


@dataclass(frozen=True)
class Batch:
    """One micro-batch: [B, S] LongTensors."""

    input_ids: torch.Tensor
    targets: torch.Tensor
    """Labels shifted left by one: targets[:, t] is the token to predict at position t, or NO_LOSS."""
    position_ids: torch.Tensor
    boundaries: torch.Tensor | None
    """int32 cu_seqlens over the flattened rows: 0, then the end of each document. The last end is repeated up to a
    power of two, which limits the shapes that compiled code sees. None if every row is a single document."""
    max_length: int
    """Length of the longest document, in tokens."""
    tokens: int
    """Number of non-padding tokens."""
    target_count: int
    """Number of targets other than NO_LOSS."""
    lengths: tuple[int, ...] = ()
    """Non-padding tokens of each row; empty if unknown."""

    def mask(self) -> torch.Tensor:
        """Return a [B, S] padding mask on the host: 1.0 for tokens, 0.0 for padding."""
        width = self.input_ids.shape[1]
        return (torch.arange(width) < torch.tensor(self.lengths).unsqueeze(1)).float()

    def to(self, device: torch.device) -> Batch:
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Copy to pinned memory, from which host-to-device copies are asynchronous."""
        return self._each(torch.Tensor.pin_memory)

    def without_targets(self) -> Batch:
        """Return a dummy batch of the same shapes, so that ranks without samples still join collectives."""
        return replace(
            self,
            targets=torch.full_like(self.targets, NO_LOSS),
            tokens=0,
            target_count=0,
            lengths=(0,) * len(self.lengths),
        )

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        return replace(
            self,
            input_ids=change(self.input_ids),
            targets=change(self.targets),
            position_ids=change(self.position_ids),
            boundaries=None if self.boundaries is None else change(self.boundaries),
        )


def collate(sequences: Sequence[TokenSequence], *, pad_id: int, width: int | None, parts: int = 1) -> Batch:
    """Pad `sequences` to `width` and stack them.

    With `width=None`, pad to the longest one, rounded up so that each of `parts` equal slices of a row (context
    parallel) is a multiple of 8.
    """
    longest = max(len(sequence.input_ids) for sequence in sequences)
    if width is None:
        multiple = parts * _WIDTH_MULTIPLE
        width = -(-longest // multiple) * multiple
    if longest > width:
        raise ValueError(f"a sequence of {longest} tokens does not fit into a batch of width {width}")
    shape = (len(sequences), width)
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    targets = np.full(shape, NO_LOSS, dtype=np.int64)
    position_ids = np.empty(shape, dtype=np.int64)
    lengths = []
    longest_document = max(int(sequence.document_lengths.max()) for sequence in sequences)
    for row, sequence in enumerate(sequences):
        length = len(sequence.input_ids)
        input_ids[row, :length] = sequence.input_ids
        targets[row, : length - 1] = sequence.labels[1:]
        documents = np.append(sequence.document_lengths, padding_lengths(width - length, longest_document))
        position_ids[row] = restarting_positions(documents)
        lengths.append(documents)
    all_lengths = np.concatenate(lengths)
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        targets=torch.from_numpy(targets),
        position_ids=torch.from_numpy(position_ids),
        boundaries=None if (all_lengths == width).all() else padded_cu_seqlens(all_lengths),
        max_length=longest_document,
        tokens=sum(len(sequence.input_ids) for sequence in sequences),
        target_count=int((targets != NO_LOSS).sum()),
        lengths=tuple(len(sequence.input_ids) for sequence in sequences),
    )


def padding_lengths(tokens: int, longest: int) -> Ints:
    """Split `tokens` of padding into documents of at most `longest` tokens, and return their lengths."""
    whole, rest = divmod(tokens, longest)
    return np.array([longest] * whole + [rest] * (rest > 0), dtype=np.int32)


def restarting_positions(lengths: Ints) -> NDArray[np.int64]:
    """Return the position ids of consecutive documents of these lengths."""
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    return np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(starts, lengths)


def padded_cu_seqlens(lengths: Ints) -> torch.Tensor:
    """Return `Batch.boundaries` for documents of these lengths."""
    padded = 1 << (len(lengths) - 1).bit_length()
    ends = np.full(padded + 1, lengths.sum(), dtype=np.int32)
    ends[0] = 0
    ends[1 : len(lengths) + 1] = np.cumsum(lengths)
    return torch.from_numpy(ends)
