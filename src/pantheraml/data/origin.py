"""Trace training sequences back to their source: file, row and first words of each document."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pantheraml.data.dataset import TokenDataset
from pantheraml.data.rows import Unit

MAX_DOCUMENTS = 8
"""Documents listed per sequence; the rest are only counted."""
MAX_SEQUENCES = 8
SHOWN_CHARACTERS = 60
_EXCERPT_TOKENS = 64
_SUMMARY_DOCUMENTS = 3


class Source(NamedTuple):
    """A source file, and whether its rows are numbered as lines or rows."""

    file: str | None
    unit: Unit | None


@dataclass(frozen=True)
class Document:
    file: str | None
    """None, like the next two, if unknown."""
    unit: Unit | None
    number: int | None
    text: str
    """First characters, on one line, with control characters escaped."""
    suspect: bool = False
    """Whether it contains the token position in question."""

    def __str__(self) -> str:
        place = "" if self.file is None else f"{Path(self.file).name} {self.unit} {self.number} "
        return f'{place}"{self.text}"'


@dataclass(frozen=True)
class Origin:
    """Source documents of one sequence."""

    sample: int
    documents: list[Document]
    """The suspect document, if known, then the first of the others."""
    count: int
    """Total number of documents in the sequence."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Origins:
    """Looks up the source documents of sequences of a data set."""

    def __init__(self, dataset: TokenDataset, sources: Sequence[Source], tokenizer: Callable[[], Any]) -> None:
        """`sources` in the order of the data set's file indices; `tokenizer` is loaded on first use."""
        self._dataset, self._sources, self._load = dataset, sources, tokenizer

    def __call__(self, samples: Sequence[int], tokens: Sequence[int] | None = None) -> list[Origin]:
        """Return the origins of the first few `samples`; `tokens` is the suspect position in each, if known."""
        positions: Sequence[int | None] = [None] * len(samples) if tokens is None else tokens
        decode = self._load().decode
        pairs = list(zip(samples, positions, strict=True))[:MAX_SEQUENCES]
        return [self._origin(int(sample), position, decode) for sample, position in pairs]

    def _origin(self, sample: int, position: int | None, decode: Callable[[list[int]], str]) -> Origin:
        sequence, places = self._dataset.sequence(sample), self._dataset.document_places(sample)
        ends = np.cumsum(sequence.document_lengths)
        count = len(ends)
        # positions beyond the last end are padding
        suspect = (
            None if position is None or position >= ends[-1] else int(np.searchsorted(ends, position, side="right"))
        )
        others = [number for number in range(count) if number != suspect]
        documents = []
        for number in ([] if suspect is None else [suspect]) + others:
            start, end = ends[number] - sequence.document_lengths[number], ends[number]
            text = first_words(decode(sequence.input_ids[start : min(end, start + _EXCERPT_TOKENS)].tolist()))
            file, row = places[number] if places else (-1, 0)
            known = 0 <= file < len(self._sources)
            source = self._sources[file] if known else Source(None, None)
            documents.append(Document(*source, row if known else None, text, number == suspect))
            if len(documents) == MAX_DOCUMENTS:
                break
        return Origin(sample, documents, count)


def first_words(text: str) -> str:
    """Return the beginning of a text on one line, with control characters escaped."""
    line = " ".join(text.split())
    cut = line if len(line) <= SHOWN_CHARACTERS else line[:SHOWN_CHARACTERS].rstrip() + "..."
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut)


def summarize_origins(origins: Sequence[Origin]) -> str:
    """Summarize in one line: the suspect documents, or else the first ones, and how many more there are."""
    documents = [document for origin in origins for document in origin.documents]
    documents.sort(key=lambda document: not document.suspect)
    count, suspects = sum(origin.count for origin in origins), sum(document.suspect for document in documents)
    shown = documents[: min(_SUMMARY_DOCUMENTS, suspects or _SUMMARY_DOCUMENTS)]
    text = ", ".join(map(str, shown))
    more = count - len(shown)
    if more <= 0:
        return text
    return f"{text}, packed with {more} more" if suspects == len(shown) else f"{text} and {more} more"
