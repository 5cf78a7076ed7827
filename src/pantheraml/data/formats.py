"""What a row may look like, and how it becomes one document.

    format        columns                          document (loss on what stands in brackets)
    text          text                             [text EOS]
    prompt        prompt, completion               prompt [completion EOS]
    instruction   instruction, (input,) output     the template below [output EOS]
    messages      messages: [{role, content}]      the tokenizer's chat template; loss on assistant turns

A document starts with whatever the tokenizer puts before a text (a BOS token, or nothing); its first token never bears
loss. Prompt and completion are tokenised apart, so a prompt has the same tokens in training as in generation.

The instruction template, without its input part where `input` is missing or empty:

    ### Instruction:
    {instruction}

    ### Input:
    {input}

    ### Response:
    {output}
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pantheraml.base.errors import ModelError, UnsupportedModelError
from pantheraml.data.chat import ChatEncoder
from pantheraml.data.documents import Ints, as_ints
from pantheraml.data.rows import Row, RowError, kind_of

# in the order of detection: a chat or instruction data set often carries a rendered `text` besides
COLUMNS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
}
ACCEPTED = "`text`, `prompt` + `completion`, `messages`, or `instruction` (+ `input`) + `output`"

Encoded = tuple[Ints, Ints]
"""Tokens of a document, and its loss runs, which are empty if none of them bears loss."""


def detect(columns: Iterable[str]) -> str | None:
    """The format whose columns are all there, or None."""
    present = set(columns)
    return next((name for name, needed in COLUMNS.items() if present.issuperset(needed)), None)


def checked(format: str, row: Row) -> Row:
    """The fields of `row` that its format reads, each found to be what it has to be; else RowError."""
    if format == "messages":
        return {"messages": _messages(_field(row, "messages"))}
    fields = {name: _string(row, name) for name in COLUMNS[format]}
    if format == "instruction" and row.get("input") is not None:
        fields["input"] = _string(row, "input", may_be_empty=True)
    return fields


def _field(row: Row, name: str) -> Any:
    if name not in row:
        raise RowError(f"expected the field `{name}`, found only {', '.join(map(str, row)) or 'no fields'}", name)
    return row[name]


def _string(row: Row, name: str, *, may_be_empty: bool = False) -> str:
    value = _field(row, name)
    if not isinstance(value, str):
        raise RowError(f"expected a string, found {kind_of(value)}", name)
    if not may_be_empty and not value.strip():
        raise RowError(f"expected text, found {kind_of(value)}" if value else "expected text, found nothing", name)
    _refuse_surrogates(value, name)
    return value


def _refuse_surrogates(value: str, name: str) -> None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as err:
        code = ord(value[err.start])
        raise RowError(f"expected Unicode text, found half a surrogate pair (\\u{code:04x})", name) from err


def _messages(value: Any) -> list[Row]:
    if not isinstance(value, list) or not value:
        raise RowError(f"expected a list of {{role, content}} objects, found {kind_of(value)}", "messages")
    messages = []
    for index, message in enumerate(value):
        place = f"messages[{index}]"
        if not isinstance(message, dict):
            raise RowError(f"expected a {{role, content}} object, found {kind_of(message)}", place)
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                raise RowError(f"expected a string, found {kind_of(message.get(name))}", f"{place}.{name}")
            _refuse_surrogates(message[name], f"{place}.{name}")
        # Arrow fills the optional keys of other messages with null
        messages.append({name: part for name, part in message.items() if part is not None})
    if not any(message["role"] == "assistant" for message in messages):
        raise RowError("expected at least one message with the role `assistant`, found none", "messages")
    return messages


class Encoder:
    """Turns checked fields into token documents, for one format and tokenizer."""

    def __init__(self, format: str, tokenizer: Any) -> None:
        self._format = format
        self._tokenizer = tokenizer
        self._prefix = special_prefix(tokenizer)
        self._eos: int | None = tokenizer.eos_token_id
        self._chat = ChatEncoder(tokenizer) if format == "messages" else None

    def encode(self, rows: list[Row]) -> list[Encoded | RowError]:
        if self._chat is not None:
            return self._chat.encode(rows)
        if self._format == "text":
            return [self._document([], ids) for ids in self._ids([row["text"] for row in rows])]
        prompts = [row["prompt"] if self._format == "prompt" else _instruction(row) for row in rows]
        answers = [row["completion" if self._format == "prompt" else "output"] for row in rows]
        ids = self._ids(prompts + answers)
        return [self._document(*pair) for pair in zip(ids[: len(rows)], ids[len(rows) :], strict=True)]

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return plain_ids(self._tokenizer, texts)

    def _document(self, prompt: list[int], answer: list[int]) -> Encoded:
        tokens = _with_prefix(self._prefix, prompt + answer)
        given = len(tokens) - len(answer)
        if self._eos is not None and tokens[-1:] != [self._eos]:
            tokens.append(self._eos)
        skipped = max(1, given)  # nothing precedes the first token to predict it from
        return as_ints(tokens), as_ints([skipped, len(tokens) - skipped] if len(tokens) > skipped else [])


def _instruction(row: Row) -> str:
    given = f"### Input:\n{row['input']}\n\n" if row.get("input") else ""
    return f"### Instruction:\n{row['instruction']}\n\n{given}### Response:\n"


def plain_ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Token ids of each text, without special tokens around it."""
    encoded = tokenizer(
        texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )
    ids: list[list[int]] = encoded["input_ids"]
    return ids


def special_prefix(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text: usually one BOS token, or nothing."""
    if not tokenizer.is_fast:
        raise UnsupportedModelError(
            f"The tokenizer {type(tokenizer).__name__} has no fast (Rust) implementation.",
            todo="Convert it to a tokenizer.json, or name another one with model.tokenizer.",
        )
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a", add_special_tokens=True)["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return list(full[:start])
    raise ModelError(
        "The tokenizer's special tokens change the text between them, so its documents have no clear start.",
        todo="Name another tokenizer with model.tokenizer.",
    )


def _with_prefix(prefix: list[int], ids: list[int]) -> list[int]:
    """Texts that were rendered elsewhere often carry the BOS token already; it must not stand twice."""
    return list(ids) if ids[: len(prefix)] == prefix else prefix + ids


def render_prompt(format: str, prompt: str, tokenizer: Any) -> list[int]:
    """The tokens that a user's prompt becomes, just as a prompt of the training data of that format does.

    For `instruction` the prompt is the instruction (without input), for `messages` a single user turn.
    """
    if format == "messages":
        return ChatEncoder(tokenizer).prompt([{"role": "user", "content": prompt}])
    text = _instruction({"instruction": prompt}) if format == "instruction" else prompt
    return _with_prefix(special_prefix(tokenizer), plain_ids(tokenizer, [text])[0])
