"""From sequences to the tensors of one forward pass.

Position ids restart at 0 with every document, and padding counts as a document of its own. With no attention mask
given, transformers reads document borders from those restarts, so nothing attends across documents or to padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pantheraml.data.documents import NO_LOSS, TokenSequence

_WIDTH_MULTIPLE = 8  # tensor cores want it, and it bounds the number of distinct shapes


@dataclass(frozen=True)
class Batch:
    """[B, S] LongTensors of one micro-batch."""

    input_ids: torch.Tensor
    targets: torch.Tensor
    """targets[:, t] is the token to predict at position t (labels shifted left by one), or NO_LOSS."""
    position_ids: torch.Tensor
    tokens: int
    """Tokens that are not padding."""

    def to(self, device: torch.device) -> Batch:
        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=True)

        return Batch(moved(self.input_ids), moved(self.targets), moved(self.position_ids), self.tokens)

    def pin_memory(self) -> Batch:
        """In page-locked memory, from where a copy to a GPU runs beside its work."""
        return Batch(
            self.input_ids.pin_memory(), self.targets.pin_memory(), self.position_ids.pin_memory(), self.tokens
        )


def collate(sequences: Sequence[TokenSequence], *, pad_id: int, width: int | None) -> Batch:
    """Lay `sequences` side by side, padded to `width`; None = the longest of them, rounded up to a multiple of 8."""
    longest = max(len(sequence.input_ids) for sequence in sequences)
    if width is None:
        width = -(-longest // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
    if longest > width:
        raise ValueError(f"a sequence of {longest} tokens does not fit into a batch of width {width}")
    shape = (len(sequences), width)
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    targets = np.full(shape, NO_LOSS, dtype=np.int64)
    position_ids = np.empty(shape, dtype=np.int64)
    for row, sequence in enumerate(sequences):
        length = len(sequence.input_ids)
        input_ids[row, :length] = sequence.input_ids
        targets[row, : length - 1] = sequence.labels[1:]
        documents = np.append(sequence.document_lengths, width - length)
        starts = np.cumsum(documents) - documents
        position_ids[row] = np.arange(width) - np.repeat(starts, documents)
    tokens = sum(len(sequence.input_ids) for sequence in sequences)
    return Batch(torch.from_numpy(input_ids), torch.from_numpy(targets), torch.from_numpy(position_ids), tokens)
