"""Encode conversations with the tokenizer's chat template, with loss on assistant turns only.

If the template marks assistant text with {% generation %}, those marks decide. Otherwise a turn is located by partial
rendering: it starts where the conversation before it, plus the generation prompt, ends, and it ends where the
conversation including it ends. Both must be prefixes of the full rendering, or the row is rejected: a wrong mask would
silently train the model on the user's words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pantheraml.data.documents import Ints, as_ints, runs_from_mask
from pantheraml.data.render import Renderer, Span
from pantheraml.data.rows import Row, RowError
from pantheraml.data.toolcalls import called_functions, fit_to_template

_MATCH_CHARACTERS = 16  # length of the prefix used to find a turn in another rendering


@dataclass(frozen=True)
class _Rendered:
    """A rendered conversation and the character spans of its assistant turns."""

    text: str
    spans: list[Span]
    marked: bool = False
    """Whether the spans come from the template's {% generation %} marks."""


class ChatEncoder:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._renderer = Renderer(tokenizer)

    def encode(self, rows: list[Row]) -> list[tuple[Ints, Ints] | RowError]:
        # render all rows before tokenizing: the Rust tokenizer aborts the process at a memory limit
        with self._renderer.bounded():
            rendered = [self._render(row) for row in rows]
        return [each if isinstance(each, RowError) else self._document(each) for each in rendered]

    def prompt(self, messages: list[Row], tools: list[Row] | None = None) -> list[int]:
        """Return the tokens of a conversation, including the generation prompt."""
        with self._renderer.bounded():
            messages = fit_to_template(messages, lambda form: self._renderer.text(form, tools))
            text = self._renderer.text(messages, tools, add_generation_prompt=True)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _render(self, row: Row) -> _Rendered | RowError:
        tools: list[Row] | None = row.get("tools")
        try:
            messages = fit_to_template(row["messages"], lambda messages: self._renderer.text(messages, tools))
            if self._renderer.has_generation_marks(tools):
                return _Rendered(*self._renderer.marked(messages, tools), marked=True)
            return self._locate_turns(messages, tools)
        except RowError as err:
            return err

    def _locate_turns(self, messages: list[Row], tools: list[Row] | None) -> _Rendered:
        text = self._renderer.text(messages, tools)
        spans = [
            self._turn_span(messages, tools, index, text)
            for index, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        return _Rendered(text, spans)

    def _turn_span(self, messages: list[Row], tools: list[Row] | None, index: int, text: str) -> Span:
        """Return the span of assistant turn `index` in the rendered conversation."""
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
            "expected a turn that can be located; the chat template renders it differently depending on the messages "
            "around it, and has no {% generation %} marks for assistant text",
            f"messages[{index}]",
        )

    def _document(self, rendered: _Rendered) -> tuple[Ints, Ints]:
        encoded = self._tokenizer(rendered.text, add_special_tokens=False, return_attention_mask=False, verbose=False)
        mask = np.zeros(len(encoded["input_ids"]), dtype=np.int8)
        for span in rendered.spans:
            mask[_tokens_within(encoded, span, include_straddling=rendered.marked)] = 1
        mask[:1] = 0  # the first token has no context to be predicted from
        return as_ints(encoded["input_ids"]), runs_from_mask(mask)


def _length_of_turn(message: Row, as_last: str, text: str, start: int) -> int:
    """Return the length of the turn at `start` of `text`, given its rendering as the last turn; 0 if not found.

    Some templates (Qwen3's) render the last turn differently from earlier ones, with an empty thinking block before
    it. Then the turn is its content or tool calls, plus the closing that follows them when it is the last.
    """
    content = (message["content"] or "").strip()
    _, found, closing = as_last.rpartition(content) if content else ("", "", "")
    if found and text.startswith(content + closing, start):
        return len(content) + len(closing)
    if message.get("tool_calls"):
        at = as_last.find(text[start : start + _MATCH_CHARACTERS])
        calls = as_last[at:]
        if at >= 0 and text.startswith(calls, start) and all(name in calls for name in called_functions([message])):
            return len(calls)
    return 0


def _tokens_within(encoded: Any, span: Span, *, include_straddling: bool) -> slice:
    """Return the tokens of a character span; `include_straddling` also counts a first token that starts before it."""

    def first_in(characters: range) -> int | None:
        # some characters, such as stripped white space, belong to no token
        return next((token for at in characters if (token := encoded.char_to_token(at)) is not None), None)

    first, last = first_in(range(span[0], span[1])), first_in(range(span[1] - 1, span[0] - 1, -1))
    if first is None or last is None:
        return slice(0)
    if not include_straddling and encoded.token_to_chars(first).start < span[0]:
        first += 1
    return slice(first, last + 1)
