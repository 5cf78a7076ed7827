"""Where a training sequence came from: the file and row of each of its documents, and how each begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pantheraml.data.dataset import TokenDataset
from pantheraml.data.rows import Unit

MOST_DOCUMENTS = 8
"""Of one sequence; more are counted."""
MOST_SEQUENCES = 8
SHOWN_CHARACTERS = 60
_SHOWN_TOKENS = 64
_SAID_DOCUMENTS = 3


class Source(NamedTuple):
    """A file that data was read from."""

    file: str | None
    unit: Unit | None


@dataclass(frozen=True)
class Document:
    file: str | None
    """None, and so the next two: not known."""
    unit: Unit | None
    number: int | None
    text: str
    """Its first characters, on one line, with control characters escaped."""
    suspect: bool = False
    """What was looked for is in this one."""

    def __str__(self) -> str:
        place = "" if self.file is None else f"{Path(self.file).name} {self.unit} {self.number} "
        return f'{place}"{self.text}"'


@dataclass(frozen=True)
class Origin:
    """Of one sequence."""

    sample: int
    documents: list[Document]
    """The suspect one, if it is known, then the first of the others."""
    count: int
    """Of all."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Origins:
    """Tells where sequences of a data set came from."""

    def __init__(self, dataset: TokenDataset, sources: Sequence[Source], tokenizer: Callable[[], Any]) -> None:
        """`sources`: those of the data, in order. `tokenizer` is loaded when somebody asks."""
        self._dataset, self._sources, self._load = dataset, sources, tokenizer

    def __call__(self, samples: Sequence[int], tokens: Sequence[int] | None = None) -> list[Origin]:
        """Of the first few of `samples`; `tokens`: the place in each that something was found at, if it is known."""
        places: Sequence[int | None] = [None] * len(samples) if tokens is None else tokens
        decode = self._load().decode
        pairs = list(zip(samples, places, strict=True))[:MOST_SEQUENCES]
        return [self._origin(int(sample), place, decode) for sample, place in pairs]

    def _origin(self, sample: int, place: int | None, decode: Callable[[list[int]], str]) -> Origin:
        sequence, places = self._dataset.sequence(sample), self._dataset.document_places(sample)
        ends = np.cumsum(sequence.document_lengths)
        count = len(ends)
        # beyond the last end is padding
        suspect = None if place is None or place >= ends[-1] else int(np.searchsorted(ends, place, side="right"))
        shown = [number for number in range(count) if number != suspect]
        found = []
        for number in ([] if suspect is None else [suspect]) + shown:
            start, end = ends[number] - sequence.document_lengths[number], ends[number]
            text = first_words(decode(sequence.input_ids[start : min(end, start + _SHOWN_TOKENS)].tolist()))
            file, row = places[number] if places else (-1, 0)
            known = 0 <= file < len(self._sources)
            source = self._sources[file] if known else Source(None, None)
            found.append(Document(*source, row if known else None, text, number == suspect))
            if len(found) == MOST_DOCUMENTS:
                break
        return Origin(sample, found, count)


def first_words(text: str) -> str:
    """The beginning of a text on one line. What a terminal could act on is escaped."""
    line = " ".join(text.split())
    cut = line if len(line) <= SHOWN_CHARACTERS else line[:SHOWN_CHARACTERS].rstrip() + "..."
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut)


def said(found: Sequence[Origin]) -> str:
    """In a line: the suspect documents or else the first ones, and how many more there are."""
    documents = [document for origin in found for document in origin.documents]
    documents.sort(key=lambda document: not document.suspect)
    count, suspects = sum(origin.count for origin in found), sum(document.suspect for document in documents)
    shown = documents[: min(_SAID_DOCUMENTS, suspects or _SAID_DOCUMENTS)]
    text = ", ".join(map(str, shown))
    more = count - len(shown)
    if more <= 0:
        return text
    return f"{text}, packed with {more} more" if suspects == len(shown) else f"{text} and {more} more"
