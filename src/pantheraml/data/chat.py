"""Conversations: the tokenizer's chat template, and which of its tokens the assistant wrote.

Where the template marks the assistant's part with {% generation %}, that mark decides. Otherwise a turn is found by
rendering: the conversation up to the turn, with the generation prompt, is where it begins, and the conversation up to
and including the turn is where it ends. Both must agree with the whole, or the row is refused: a wrong mask would train
the model on the user's words without anybody noticing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pantheraml.data.documents import Ints, as_ints, runs_from_mask
from pantheraml.data.render import Renderer, Span
from pantheraml.data.rows import Row, RowError
from pantheraml.data.toolcalls import called, fitted

_SHARED = 16  # characters that two renderings of a turn must share to be compared further


@dataclass(frozen=True)
class _Rendered:
    """A conversation as text, and where the assistant's part stands in it."""

    text: str
    spans: list[Span]
    marked: bool = False
    """Whether the template itself says so."""


class ChatEncoder:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._renderer = Renderer(tokenizer)

    def encode(self, rows: list[Row]) -> list[tuple[Ints, Ints] | RowError]:
        # all are rendered before any is tokenized: the tokenizer ends the process where memory is bounded
        with self._renderer.bounded():
            rendered = [self._rendered(row) for row in rows]
        return [each if isinstance(each, RowError) else self._document(each) for each in rendered]

    def prompt(self, messages: list[Row]) -> list[int]:
        """Tokens of a conversation, up to where the assistant's answer begins."""
        with self._renderer.bounded():
            text = self._renderer.text(messages, None, add_generation_prompt=True)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _rendered(self, row: Row) -> _Rendered | RowError:
        tools: list[Row] | None = row.get("tools")
        try:
            messages = fitted(row["messages"], lambda messages: self._renderer.text(messages, tools))
            if self._renderer.marks_turns(tools):
                return _Rendered(*self._renderer.marked(messages, tools), marked=True)
            return self._found_turns(messages, tools)
        except RowError as err:
            return err

    def _found_turns(self, messages: list[Row], tools: list[Row] | None) -> _Rendered:
        text = self._renderer.text(messages, tools)
        spans = [
            self._turn(messages, tools, index, text)
            for index, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        return _Rendered(text, spans)

    def _turn(self, messages: list[Row], tools: list[Row] | None, index: int, text: str) -> Span:
        """Where the assistant's turn `index` begins and ends in the rendered conversation."""
        if index == 0:
            raise RowError("expected a message before the assistant's first one, found none", "messages")
        before = self._renderer.text(messages[:index], tools, add_generation_prompt=True)
        if text.startswith(before):
            last = index == len(messages) - 1
            until = text if last else self._renderer.text(messages[: index + 1], tools)
            if text.startswith(until) and until.startswith(before):
                return len(before), len(until)
            length = _length_of_turn(messages[index], until.removeprefix(before), text, len(before))
            if length:
                return len(before), len(before) + length
        raise RowError(
            "expected a turn that can be told from the rest; the chat template writes it differently with and without "
            "what comes before or after it, and has no {% generation %} mark for what the assistant wrote",
            f"messages[{index}]",
        )

    def _document(self, rendered: _Rendered) -> tuple[Ints, Ints]:
        encoded = self._tokenizer(rendered.text, add_special_tokens=False, return_attention_mask=False, verbose=False)
        mask = np.zeros(len(encoded["input_ids"]), dtype=np.int8)
        for span in rendered.spans:
            mask[_tokens_within(encoded, span, astride=rendered.marked)] = 1
        mask[:1] = 0  # nothing precedes the first token to predict it from
        return as_ints(encoded["input_ids"]), runs_from_mask(mask)


def _length_of_turn(message: Row, alone: str, text: str, start: int) -> int:
    """Characters of a turn that stands at `start` of `text`, found by how it is written where it is the last; else 0.

    Some templates (Qwen3's) write the last turn differently from earlier ones, with an empty block of thoughts before
    it. Then the turn is what was said or called, followed by what follows it when it is the last.
    """
    said = (message["content"] or "").strip()
    _, found, closing = alone.rpartition(said) if said else ("", "", "")
    if found and text.startswith(said + closing, start):
        return len(said) + len(closing)
    if message.get("tool_calls"):
        at = alone.find(text[start : start + _SHARED])
        if at >= 0 and text.startswith(alone[at:], start) and all(name in alone[at:] for name in called([message])):
            return len(alone) - at
    return 0


def _tokens_within(encoded: Any, span: Span, *, astride: bool) -> slice:
    """The tokens inside a span of characters; one that reaches over from before it counts where `astride`."""

    def first_in(characters: range) -> int | None:
        # some characters, such as stripped white space, belong to no token
        return next((token for at in characters if (token := encoded.char_to_token(at)) is not None), None)

    first, last = first_in(range(span[0], span[1])), first_in(range(span[1] - 1, span[0] - 1, -1))
    if first is None or last is None:
        return slice(0)
    if not astride and encoded.token_to_chars(first).start < span[0]:
        first += 1
    return slice(first, last + 1)
