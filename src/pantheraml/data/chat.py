"""Conversations: the tokenizer's chat template, and which of its tokens the assistant wrote.

Where the template marks the assistant's part with {% generation %}, that mark decides. Otherwise a turn is found by
rendering: the conversation up to the turn, with the generation prompt, is where it begins, and the conversation up to
and including the turn is where it ends. Both must agree with the whole, or the row is refused: a wrong mask would train
the model on the user's words without anybody noticing.
"""

from __future__ import annotations

import re
from typing import Any

import jinja2
import numpy as np

from pantheraml.base.errors import ModelError
from pantheraml.data.documents import Ints, as_ints, runs_from_mask
from pantheraml.data.rows import Row, RowError

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]


def chat_template(tokenizer: Any) -> str:
    """The template that conversations are written with; ModelError where there is none."""
    try:
        template: str = tokenizer.get_chat_template()
    except ValueError as err:  # none at all, or several and none of them the default
        raise ModelError(
            "The data holds messages, but the tokenizer has no chat template to write them with.",
            todo="Name a tokenizer that has one with model.tokenizer (such as the model's chat version's), add "
            "a chat_template.jinja to its folder, or use prompt and completion columns.",
        ) from err
    return template


class ChatEncoder:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._marked = bool(_GENERATION_MARK.search(chat_template(tokenizer)))

    def encode(self, rows: list[Row]) -> list[tuple[Ints, Ints] | RowError]:
        encoded: list[tuple[Ints, Ints] | RowError] = []
        for row in rows:
            try:
                encoded.append(self._marked_turns(row) if self._marked else self._found_turns(row))
            except RowError as err:
                encoded.append(err)
        return encoded

    def prompt(self, messages: list[Row]) -> list[int]:
        """Tokens of a conversation, up to where the assistant's answer begins."""
        text = self._rendered(messages, add_generation_prompt=True)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _rendered(self, messages: list[Row], *, add_generation_prompt: bool = False) -> str:
        text: str = self._apply(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        return text

    def _apply(self, messages: list[Row], **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(messages, **options)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as err:  # what expressions in it can raise
            raise RowError(f"expected a conversation that the chat template accepts: {err}", "messages") from err

    def _marked_turns(self, row: Row) -> tuple[Ints, Ints]:
        encoded = self._apply(row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return _document(encoded["input_ids"], encoded["assistant_masks"])

    def _found_turns(self, row: Row) -> tuple[Ints, Ints]:
        messages: list[Row] = row["messages"]
        text = self._rendered(messages)
        spans = [
            self._turn(messages, index, text)
            for index, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        encoded = self._tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)
        mask = np.zeros(len(encoded["input_ids"]), dtype=np.int8)
        for span in spans:
            mask[_tokens_within(encoded, span)] = 1
        return _document(encoded["input_ids"], mask)

    def _turn(self, messages: list[Row], index: int, text: str) -> Span:
        """Where the assistant's turn `index` begins and ends in the rendered conversation."""
        if index == 0:
            raise RowError("expected a message before the assistant's first one, found none", "messages")
        before = self._rendered(messages[:index], add_generation_prompt=True)
        if text.startswith(before):
            until = text if index == len(messages) - 1 else self._rendered(messages[: index + 1])
            if text.startswith(until) and until.startswith(before):
                return len(before), len(until)
            # Some templates (Qwen3's) write the last turn differently from earlier ones, with an empty block of
            # thoughts before it; then the turn is what was said, followed by what follows it when it is the last.
            said = messages[index]["content"].strip()
            _, found, closing = until.rpartition(said)
            if said and found and text.startswith(said + closing, len(before)):
                return len(before), len(before) + len(said) + len(closing)
        raise RowError(
            "expected a turn that can be told from the rest; the chat template writes it differently with and without "
            "what comes before or after it, and has no {% generation %} mark for what the assistant wrote",
            f"messages[{index}]",
        )


def _tokens_within(encoded: Any, span: Span) -> slice:
    """The tokens that start inside a span of characters; one that reaches over from before it is left out."""

    def first_in(characters: range) -> int | None:
        # some characters, such as stripped white space, belong to no token
        return next((token for at in characters if (token := encoded.char_to_token(at)) is not None), None)

    first, last = first_in(range(span[0], span[1])), first_in(range(span[1] - 1, span[0] - 1, -1))
    if first is None or last is None:
        return slice(0)
    if encoded.token_to_chars(first).start < span[0]:
        first += 1
    return slice(first, last + 1)


def _document(ids: list[int], mask: Any) -> tuple[Ints, Ints]:
    bears_loss = np.array(mask, dtype=np.int8)
    bears_loss[:1] = 0  # nothing precedes the first token to predict it from
    return as_ints(ids), runs_from_mask(bears_loss)
