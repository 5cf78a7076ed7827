"""Token documents in flat arrays: the currency between tokenising, packing and the Arrow files.

A document is a run of tokens that attends to itself only. Which of its tokens bear loss is kept as alternating run
lengths (skip, take, skip, take, ...), which is two numbers for most documents where a mask would be one per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
NO_LOSS = -100
"""The label of a token that bears no loss (torch's and transformers' convention)."""


@dataclass(frozen=True)
class TokenSequence:
    """One training sequence: a pack of documents, or a single document."""

    input_ids: Ints
    labels: Ints
    """Aligned with input_ids; NO_LOSS where a token is not to be predicted, always so for a document's first token."""
    document_lengths: Ints


@dataclass
class Documents:
    """Documents as they come out of tokenising: one list entry per document."""

    tokens: list[Ints] = field(default_factory=list)
    loss_runs: list[Ints] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """The line or row of the source file that each one is."""
    files: list[int] = field(default_factory=list)
    """The number of that file among the sources."""

    def add(self, tokens: Ints, loss_runs: Ints, row: int) -> None:
        self.tokens.append(tokens)
        self.loss_runs.append(loss_runs)
        self.rows.append(row)
        self.files.append(0)

    def extend(self, other: Documents, file: int) -> None:
        """By documents of one file."""
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
    """[0, 0, 1, 1, 0] -> (2 skipped, 2 taken); what follows the last taken token needs no run."""
    edges = np.flatnonzero(np.diff(mask, prepend=np.int8(0), append=np.int8(0)))
    return np.diff(edges, prepend=0).astype(np.int32)


def cut_runs(runs: Ints, length: int) -> Ints:
    """The runs of a document cut to its first `length` tokens; empty if none of those bears loss."""
    ends = np.minimum(np.cumsum(runs), length)
    kept = np.diff(ends, prepend=0).astype(np.int32)
    last = np.flatnonzero(kept[1::2])
    return kept[: 2 * (int(last[-1]) + 1)] if len(last) else kept[:0]


def loss_mask(runs: Ints, length: int) -> NDArray[np.bool_]:
    """One boolean per token, from (skip, take, ...) runs that may end before `length`."""
    mask = np.zeros(length, dtype=np.bool_)
    taken = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
    mask[: len(taken)] = taken
    return mask


def joined_runs(documents: Iterable[tuple[Ints, int]]) -> Iterator[int]:
    """The runs of several documents (each with its length) laid end to end, as runs of one sequence."""
    skipped = 0
    for runs, length in documents:
        yield skipped + int(runs[0])
        yield from runs[1:].tolist()
        skipped = length - int(runs.sum())
