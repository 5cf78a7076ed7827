"""Find the tokens of the responses in tokenized conversations.

Markers are searched in the text of the tokens, not as token sequences: how a marker is split into tokens depends on
what stands around it. A token belongs to a response if it starts within it; white space of the marker may be part of
the response's first token.

A response ends with the first end-of-turn or eos token before the next response, else where the next instruction
starts, else with the document.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pantheraml.data.chat_templates.markers import TurnMarkers

Ids = Sequence[int] | NDArray[np.int64]
Mask = NDArray[np.bool_]

IGNORED = -100
"""Label of tokens without loss."""
_UNDECODED = "\ufffd"
_MAX_TOKENS_OF_CHARACTER = 4


class ResponseMask:
    """Finds response tokens; `last_only`: only those of the last response of a document."""

    def __init__(self, plain: Any, markers: TurnMarkers, *, last_only: bool = False) -> None:
        self._pieces = _TokenText(plain)
        special = [*plain.all_special_tokens, *plain.get_added_vocab()]
        self._response = _pattern(markers.response, special)
        self._instruction = _pattern(markers.instruction, special)
        self._eos: int | None = plain.eos_token_id
        ends = {plain.convert_tokens_to_ids(token) for token in markers.ends} | {self._eos}
        self._ends = np.array(sorted(end for end in ends if end is not None), dtype=np.int64)
        self._last_only = last_only

    def __call__(self, ids: Ids, lengths: Iterable[int] | None = None) -> Mask:
        """Return which tokens of a row belong to responses; `lengths`: those of the row's packed documents."""
        if lengths is None:
            return self._document(ids)
        bounds = itertools.pairwise(itertools.accumulate(map(int, lengths), initial=0))
        return np.concatenate([self._document(ids[start:stop]) for start, stop in bounds])

    def labels(
        self, ids: Ids, labels: Ids | None = None, attention: Ids | None = None, lengths: Iterable[int] | None = None
    ) -> list[int]:
        """Return labels for a row: those of tokens that are no response, or had no loss before, are IGNORED."""
        keep = self(ids, lengths)
        if labels is not None:
            keep &= np.asarray(labels) != IGNORED
        if attention is not None:
            keep &= np.asarray(attention) != 0
        result: list[int] = np.where(keep, np.asarray(ids), IGNORED).tolist()
        return result

    def has_marker(self, ids: Ids) -> bool:
        return self._response.search(self.text(ids)) is not None

    def has_instruction(self, ids: Ids) -> bool:
        return self._instruction.search(self.text(ids)) is not None

    def text(self, ids: Ids) -> str:
        return "".join(self._pieces(ids))

    def _document(self, ids: Ids) -> Mask:
        mask = np.zeros(len(ids), dtype=np.bool_)
        pieces = self._pieces(ids)
        text = "".join(pieces)
        found = [match.span() for match in self._response.finditer(text)]
        if not found:
            return mask
        stops = np.cumsum([len(piece) for piece in pieces])
        starts = stops - [len(piece) for piece in pieces]
        ends = np.flatnonzero(np.isin(ids, self._ends))
        limits = [start for start, _ in found[1:]] + [len(text)]
        for (_, begin), limit in list(zip(found, limits, strict=True))[-1 if self._last_only else 0 :]:
            first = int(np.searchsorted(starts, begin))
            if first and stops[first - 1] > begin and text[starts[first - 1] : begin].isspace():
                first -= 1  # its white space belongs to the marker, the rest to the response
            last = _tokens_until(stops, limit)
            if (inside := ends[(ends >= first) & (ends < last)]).size:
                last = self._with_eos(ids, pieces, int(inside[0]) + 1)
            elif instruction := self._instruction.search(text, begin, limit):
                last = _tokens_until(stops, instruction.start())
            mask[first:last] = True
        return mask

    def _with_eos(self, ids: Ids, pieces: list[str], last: int) -> int:
        """Return `last`, or the position after the eos token if only white space is before it.

        A trainer may add the eos token to a text whose end-of-turn token is another; generation stops only there.
        """
        at = last
        while at < len(ids) and pieces[at].isspace():
            at += 1
        return at + 1 if at < len(ids) and ids[at] == self._eos != ids[last - 1] else last


def _tokens_until(stops: NDArray[np.int64], limit: int) -> int:
    """Return how many tokens end at or before a character; an empty one there belongs to what follows."""
    at = int(np.searchsorted(stops, limit))
    return at + 1 if stops[at] == limit else at


def _pattern(marker: str, special: Iterable[str]) -> re.Pattern[str]:
    """Compile a marker; its outer spaces and any after special tokens are optional: tokenizers add and remove them."""
    tokens = "|".join(map(re.escape, sorted({each for each in special if each}, key=len, reverse=True)))
    parts = re.split(f"({tokens})", marker.strip(" ")) if tokens else [marker.strip(" ")]
    after = " ?" if marker.endswith(" ") else ""
    return re.compile(" ?" + " ?".join(re.escape(part.strip(" ")) for part in parts if part) + after)


class _TokenText:
    """Texts of the tokens of a row; together they are its text. Remembers what it decoded."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain
        self._known: dict[int, str] = {}
        self._characters: dict[tuple[int, ...], str] = {}
        # SentencePiece removes the space before the first token, so each token is decoded after another one
        self._anchor: list[int] = plain.encode("a", add_special_tokens=False)[-1:]
        self._anchor_text = self._raw(())

    def __call__(self, ids: Ids) -> list[str]:
        known = self._known
        row = [int(each) for each in ids]
        for each in set(row) - known.keys():
            known[each] = self._decode((each,))
        pieces = [known[each] for each in row]
        if _UNDECODED in "".join(pieces):
            for at in [at for at, piece in enumerate(pieces) if _UNDECODED in piece]:
                if pieces[at]:
                    self._join_bytes(row, pieces, at)
        return pieces

    def _join_bytes(self, row: list[int], pieces: list[str], first: int) -> None:
        """Give the text of a character that is split into several tokens to the last of them."""
        for count in range(2, _MAX_TOKENS_OF_CHARACTER + 1):
            key = tuple(row[first : first + count])
            if key not in self._characters:
                self._characters[key] = self._decode(key)
            if _UNDECODED not in (text := self._characters[key]):
                pieces[first : first + count] = [""] * (len(key) - 1) + [text]
                return

    def _decode(self, ids: tuple[int, ...]) -> str:
        text = self._raw(ids)
        return text[len(self._anchor_text) :] if text.startswith(self._anchor_text) else self._plain.decode(list(ids))

    def _raw(self, ids: tuple[int, ...]) -> str:
        text: str = self._plain.decode([*self._anchor, *ids], clean_up_tokenization_spaces=False)
        return text
