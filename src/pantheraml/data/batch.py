"""From sequences to the tensors of one forward pass.

Position ids restart at 0 with every document, and padding counts as documents of its own, none longer than the longest
real one: a model may know no position beyond, or compute the others differently for it. With no attention mask given,
transformers reads document borders from those restarts, so nothing attends across documents or to padding. For
attention that takes the borders themselves they are laid down here, where the lengths are known without asking a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from pantheraml.data.documents import NO_LOSS, Ints, TokenSequence

_WIDTH_MULTIPLE = 8  # tensor cores want it, and it bounds the number of distinct shapes


@dataclass(frozen=True)
class Batch:
    """[B, S] LongTensors of one micro-batch."""

    input_ids: torch.Tensor
    targets: torch.Tensor
    """targets[:, t] is the token to predict at position t (labels shifted left by one), or NO_LOSS."""
    position_ids: torch.Tensor
    boundaries: torch.Tensor | None
    """int32: 0 and the end of each document, over the rows laid end to end; the last end is repeated up to a power of
    two, so that compiled code meets few shapes. None where every row is one document."""
    max_length: int
    """Tokens of the longest document."""
    tokens: int
    """Tokens that are not padding."""
    target_count: int
    """Targets that are not NO_LOSS."""
    lengths: tuple[int, ...] = ()
    """Tokens of each row that are not padding; empty: not known."""

    def mask(self) -> torch.Tensor:
        """[B, S] on the host: 1.0 where a token is not padding."""
        width = self.input_ids.shape[1]
        return (torch.arange(width) < torch.tensor(self.lengths).unsqueeze(1)).float()

    def to(self, device: torch.device) -> Batch:
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """In page-locked memory, from where a copy to a GPU runs beside its work."""
        return self._each(torch.Tensor.pin_memory)

    def without_targets(self) -> Batch:
        """The same shapes, but nothing to learn: for a rank that has no samples and must keep its peers company."""
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
    """Lay `sequences` side by side, padded to `width`; None = the longest of them, rounded up so that each of `parts`
    equal parts of a row is a multiple of 8."""
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
        documents = np.append(sequence.document_lengths, padding(width - length, longest_document))
        position_ids[row] = positions(documents)
        lengths.append(documents)
    every = np.concatenate(lengths)
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        targets=torch.from_numpy(targets),
        position_ids=torch.from_numpy(position_ids),
        boundaries=None if (every == width).all() else document_ends(every),
        max_length=longest_document,
        tokens=sum(len(sequence.input_ids) for sequence in sequences),
        target_count=int((targets != NO_LOSS).sum()),
        lengths=tuple(len(sequence.input_ids) for sequence in sequences),
    )


def padding(tokens: int, longest: int) -> Ints:
    """Lengths of the documents that padding is divided into, none above `longest`."""
    whole, rest = divmod(tokens, longest)
    return np.array([longest] * whole + [rest] * (rest > 0), dtype=np.int32)


def positions(lengths: Ints) -> NDArray[np.int64]:
    """Of the tokens of documents of these lengths, in a row."""
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    return np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(starts, lengths)


def document_ends(lengths: Ints) -> torch.Tensor:
    """`Batch.boundaries` of documents of these lengths."""
    room = 1 << (len(lengths) - 1).bit_length()
    ends = np.full(room + 1, lengths.sum(), dtype=np.int32)
    ends[0] = 0
    ends[1 : len(lengths) + 1] = np.cumsum(lengths)
    return torch.from_numpy(ends)
