"""What a row may look like, and how it becomes one document.

    format        columns                          document (loss on what stands in brackets)
    text          text                             [text EOS]
    prompt        prompt, completion               prompt [completion EOS]
    instruction   instruction, (input,) output     the template below [output EOS]
                  (system, history)
    messages      messages: [{role, content}]      the tokenizer's chat template; loss on assistant turns
                  (tools)

A document starts with whatever the tokenizer puts before a text (a BOS token, or nothing); its first token never bears
loss. A prompt has the same tokens in training as in generation, and completion follows it without a seam (pairs.py).

The instruction template, without what is missing or empty. Each earlier pair of `history` stands as an instruction and
its response, before the last one:

    {system}

    ### Instruction:
    {history[0][0]}

    ### Response:
    {history[0][1]}

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
from pantheraml.data.pairs import encode_pairs, plain_ids
from pantheraml.data.rows import MOST_NAMES, Row, RowError, kind_of, names, refuse_surrogates
from pantheraml.data.toolcalls import checked_tools, may_be_silent, parsed

# in the order of detection: a chat or instruction data set often carries a rendered `text` besides
COLUMNS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
}
OPTIONAL: dict[str, tuple[str, ...]] = {"messages": ("tools",), "instruction": ("input", "system", "history")}
_TALK = frozenset({"system", "history", "tools", "input"})
"""Columns that shape a conversation: where a format does not read one of these, the data means something else."""
_IDS = frozenset({"id", "_id", "idx", "index", "uuid", "row_id", "sample_id", "__index_level_0__"})
ACCEPTED = "`text`, `prompt` + `completion`, `messages`, or `instruction` (+ `input`) + `output`"

Encoded = tuple[Ints, Ints]
"""Tokens of a document, and its loss runs, which are empty if none of them bears loss."""


def detect(columns: Iterable[str]) -> str | None:
    """The format whose columns are all there, or None."""
    present = set(columns)
    return next((name for name, needed in COLUMNS.items() if present.issuperset(needed)), None)


def unread(format: str, columns: Iterable[str]) -> tuple[list[str], list[str]]:
    """Columns that the format does not read: those that shape a conversation, and others; ids need no mention."""
    read = {*COLUMNS[format], *OPTIONAL.get(format, ())}
    left = [name for name in columns if name not in read and name.lower() not in _IDS]
    return [name for name in left if name in _TALK], [name for name in left if name not in _TALK]


def first_unread(format: str, columns: Iterable[str]) -> list[str]:
    """Those that shape a conversation, and as many of the others as a notice would name."""
    talk, others = unread(format, columns)
    return talk + others[: MOST_NAMES + 1]


def checked(format: str, row: Row) -> Row:
    """The fields of `row` that its format reads, each found to be what it has to be; else RowError."""
    if format == "messages":
        tools = checked_tools(row.get("tools"), "tools")
        return {"messages": _messages(_field(row, "messages"))} | ({"tools": tools} if tools else {})
    fields: Row = {name: _string(row, name) for name in COLUMNS[format]}
    if format == "instruction":
        optional = [name for name in ("input", "system") if row.get(name) is not None]
        fields |= {name: _string(row, name, may_be_empty=True) for name in optional}
        history = _history(row.get("history"))
        fields |= {"history": history} if history else {}
    return fields


def _field(row: Row, name: str) -> Any:
    if name not in row:
        raise RowError(f"expected the field `{name}`, found only {names(row) or 'no fields'}", name)
    return row[name]


def _string(row: Row, name: str, *, may_be_empty: bool = False) -> str:
    value = _field(row, name)
    if not isinstance(value, str):
        raise RowError(f"expected a string, found {kind_of(value)}", name)
    if not may_be_empty and not value.strip():
        raise RowError(f"expected text, found {kind_of(value)}" if value else "expected text, found nothing", name)
    refuse_surrogates(value, name)
    return value


def _history(value: Any) -> list[list[str]]:
    """Earlier turns: pairs of what was asked and what was answered, or the JSON of such a list."""
    if isinstance(value, str):
        value = parsed(value, "history") if value.strip() else None
    pairs = [] if value is None else value
    if not isinstance(pairs, list):
        raise RowError(f"expected a list of [instruction, response] pairs, found {kind_of(pairs)}", "history")
    for index, pair in enumerate(pairs):
        place = f"history[{index}]"
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise RowError(f"expected a pair of strings, found {kind_of(pair)}", place)
        for text in pair:
            refuse_surrogates(text, place)
    return pairs


def _messages(value: Any) -> list[Row]:
    if not isinstance(value, list) or not value:
        raise RowError(f"expected a list of {{role, content}} objects, found {kind_of(value)}", "messages")
    messages = [_message(message, f"messages[{index}]") for index, message in enumerate(value)]
    if not any(message["role"] == "assistant" for message in messages):
        raise RowError("expected at least one message with the role `assistant`, found none", "messages")
    return messages


def _message(value: Any, place: str) -> Row:
    if not isinstance(value, dict):
        raise RowError(f"expected a {{role, content}} object, found {kind_of(value)}", place)
    # Arrow fills the optional keys of other messages with null
    message = {name: part for name, part in value.items() if part is not None}
    if "tool_calls" in message:
        calls = checked_tools(message.pop("tool_calls"), f"{place}.tool_calls")
        message |= {"tool_calls": calls} if calls else {}
    for name in ("role", "content"):
        text = message.setdefault(name, None)
        if text is None and name == "content" and may_be_silent(message):
            continue
        if text is None and name == "content" and message["role"] == "tool":
            message["content"] = text = ""  # it answered nothing
        if not isinstance(text, str):
            also = " (or null beside `tool_calls`)" if name == "content" and message["role"] == "assistant" else ""
            raise RowError(f"expected a string{also}, found {kind_of(text)}", f"{place}.{name}")
        refuse_surrogates(text, f"{place}.{name}")
    return message


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
            return [self._document([], ids) for ids in plain_ids(self._tokenizer, [row["text"] for row in rows])]
        prompts = [row["prompt"] if self._format == "prompt" else _instruction(row) for row in rows]
        answers = [row["completion" if self._format == "prompt" else "output"] for row in rows]
        return [self._document(*pair) for pair in encode_pairs(self._tokenizer, prompts, answers)]

    def _document(self, prompt: list[int], answer: list[int]) -> Encoded:
        if not answer:  # nothing to learn but where to stop
            return as_ints([]), as_ints([])
        tokens = _with_prefix(self._prefix, prompt + answer)
        given = len(tokens) - len(answer)
        if self._eos is not None and tokens[-1:] != [self._eos]:
            tokens.append(self._eos)
        skipped = max(1, given)  # nothing precedes the first token to predict it from
        return as_ints(tokens), as_ints([skipped, len(tokens) - skipped] if len(tokens) > skipped else [])


def _instruction(row: Row) -> str:
    system = f"{row['system']}\n\n" if row.get("system") else ""
    earlier = "".join(
        f"### Instruction:\n{asked}\n\n### Response:\n{answered}\n\n" for asked, answered in row.get("history", ())
    )
    given = f"### Input:\n{row['input']}\n\n" if row.get("input") else ""
    return f"{system}{earlier}### Instruction:\n{row['instruction']}\n\n{given}### Response:\n"


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
