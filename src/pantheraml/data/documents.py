"""Tokenized documents as flat arrays, shared by tokenization, packing and the Arrow files.

A document is a span of tokens that attends only to itself. Its loss mask is run-length encoded as alternating lengths
(skip, take, skip, take, ...): two numbers for most documents, where a mask needs one per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
NO_LOSS = -100
"""Label of a token without loss (the ignore_index of torch and transformers)."""


@dataclass(frozen=True)
class TokenSequence:
    """One training sequence: several packed documents, or a single one."""

    input_ids: Ints
    labels: Ints
    """Aligned with input_ids; NO_LOSS for tokens without loss, always including each document's first token."""
    document_lengths: Ints


@dataclass
class Documents:
    """Tokenized documents: one list entry per document."""

    tokens: list[Ints] = field(default_factory=list)
    loss_runs: list[Ints] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """Line or row number in the source file."""
    files: list[int] = field(default_factory=list)
    """Index of the source file."""

    def add(self, tokens: Ints, loss_runs: Ints, row: int) -> None:
        self.tokens.append(tokens)
        self.loss_runs.append(loss_runs)
        self.rows.append(row)
        self.files.append(0)

    def extend(self, other: Documents, file: int) -> None:
        """Append the documents of one source file."""
        self.tokens.extend(other.tokens)
        self.loss_runs.extend(other.loss_runs)
        self.rows.extend(other.rows)
        self.files.extend([file] * len(other))

    def __len__(self) -> int:
        return len(self.tokens)

    def lengths(self) -> Ints:
        return np.fromiter(map(len, self.tokens), dtype=np.int32, count=len(self.tokens))


def as_ints(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int32)


def runs_from_mask(mask: NDArray[np.int8]) -> Ints:
    """Run-length encode a mask: [0, 0, 1, 1, 0] -> (skip 2, take 2). Trailing skips are dropped."""
    edges = np.flatnonzero(np.diff(mask, prepend=np.int8(0), append=np.int8(0)))
    return np.diff(edges, prepend=0).astype(np.int32)


def truncate_runs(runs: Ints, length: int) -> Ints:
    """Truncate the runs to the first `length` tokens; empty if none of those bears loss."""
    ends = np.minimum(np.cumsum(runs), length)
    kept = np.diff(ends, prepend=0).astype(np.int32)
    last = np.flatnonzero(kept[1::2])
    return kept[: 2 * (int(last[-1]) + 1)] if len(last) else kept[:0]


def loss_mask(runs: Ints, length: int) -> NDArray[np.bool_]:
    """Expand (skip, take, ...) runs, which may end before `length`, into one boolean per token."""
    mask = np.zeros(length, dtype=np.bool_)
    taken = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
    mask[: len(taken)] = taken
    return mask


def concatenate_runs(documents: Iterable[tuple[Ints, int]]) -> Iterator[int]:
    """Concatenate the runs of several documents (each with its length) into the runs of one sequence."""
    skipped = 0
    for runs, length in documents:
        yield skipped + int(runs[0])
        yield from runs[1:].tolist()
        skipped = length - int(runs.sum())
