"""Row formats, and how a row becomes one document.

    format        columns                          document (loss on the part in brackets)
    text          text                             [text EOS]
    prompt        prompt, completion               prompt [completion EOS]
    instruction   instruction, (input,) output     the template below [output EOS]
                  (system, history)
    messages      messages: [{role, content}]      the tokenizer's chat template; loss on assistant turns
                  (tools)

A document starts with the tokenizer's prefix (a BOS token, or nothing); its first token never bears loss. A prompt has
the same tokens in training as in generation, and the completion continues it without a seam (pairs.py).

The instruction template; missing or empty parts are left out. Each pair of `history` is rendered as an instruction and
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
from pantheraml.data.rows import MAX_NAMES, Row, RowError, describe, join_names, reject_surrogates
from pantheraml.data.toolcalls import calls_tools, parse_json, parse_tools

# in order of detection: chat and instruction data sets often also have a rendered `text` column
COLUMNS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
}
OPTIONAL: dict[str, tuple[str, ...]] = {"messages": ("tools",), "instruction": ("input", "system", "history")}
_CONVERSATION_COLUMNS = frozenset({"system", "history", "tools", "input"})
"""Columns that belong to a conversation: if the format does not use one of these, it may be the wrong format."""
_ID_COLUMNS = frozenset({"id", "_id", "idx", "index", "uuid", "row_id", "sample_id", "__index_level_0__"})
ACCEPTED = "`text`, `prompt` + `completion`, `messages`, or `instruction` (+ `input`) + `output`"

Encoded = tuple[Ints, Ints]
"""Tokens of a document and its loss runs, which are empty if no token bears loss."""


def detect(columns: Iterable[str]) -> str | None:
    """Return the first format whose required columns are all present, or None."""
    present = set(columns)
    return next((name for name, needed in COLUMNS.items() if present.issuperset(needed)), None)


def unused_columns(format: str, columns: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the columns that the format does not use: conversation columns, and others. Id columns are ignored."""
    used = {*COLUMNS[format], *OPTIONAL.get(format, ())}
    unused = [name for name in columns if name not in used and name.lower() not in _ID_COLUMNS]
    return [name for name in unused if name in _CONVERSATION_COLUMNS], [
        name for name in unused if name not in _CONVERSATION_COLUMNS
    ]


def first_unused_columns(format: str, columns: Iterable[str]) -> list[str]:
    """Return the unused conversation columns, and as many of the others as a notice lists."""
    conversation, others = unused_columns(format, columns)
    return conversation + others[: MAX_NAMES + 1]


def validate_row(format: str, row: Row) -> Row:
    """Return the fields of `row` that its format uses, validated; RowError if one is missing or has the wrong type."""
    if format == "messages":
        tools = parse_tools(row.get("tools"), "tools")
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
        raise RowError(f"expected the field `{name}`, found only {join_names(row) or 'no fields'}", name)
    return row[name]


def _string(row: Row, name: str, *, may_be_empty: bool = False) -> str:
    value = _field(row, name)
    if not isinstance(value, str):
        raise RowError(f"expected a string, found {describe(value)}", name)
    if not may_be_empty and not value.strip():
        raise RowError(f"expected text, found {describe(value)}" if value else "expected text, found nothing", name)
    reject_surrogates(value, name)
    return value


def _history(value: Any) -> list[list[str]]:
    """Parse earlier turns: a list of [instruction, response] pairs, or such a list as JSON."""
    if isinstance(value, str):
        value = parse_json(value, "history") if value.strip() else None
    pairs = [] if value is None else value
    if not isinstance(pairs, list):
        raise RowError(f"expected a list of [instruction, response] pairs, found {describe(pairs)}", "history")
    for index, pair in enumerate(pairs):
        place = f"history[{index}]"
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise RowError(f"expected a pair of strings, found {describe(pair)}", place)
        for text in pair:
            reject_surrogates(text, place)
    return pairs


def _messages(value: Any) -> list[Row]:
    if not isinstance(value, list) or not value:
        raise RowError(f"expected a list of {{role, content}} objects, found {describe(value)}", "messages")
    messages = [_message(message, f"messages[{index}]") for index, message in enumerate(value)]
    if not any(message["role"] == "assistant" for message in messages):
        raise RowError("expected at least one message with the role `assistant`, found none", "messages")
    return messages


def _message(value: Any, place: str) -> Row:
    if not isinstance(value, dict):
        raise RowError(f"expected a {{role, content}} object, found {describe(value)}", place)
    # Arrow fills keys that only other messages have with null
    message = {name: part for name, part in value.items() if part is not None}
    if "tool_calls" in message:
        calls = parse_tools(message.pop("tool_calls"), f"{place}.tool_calls")
        message |= {"tool_calls": calls} if calls else {}
    for name in ("role", "content"):
        text = message.setdefault(name, None)
        if text is None and name == "content" and calls_tools(message):
            continue
        if text is None and name == "content" and message["role"] == "tool":
            message["content"] = text = ""  # a tool without output
        if not isinstance(text, str):
            also = " (or null with `tool_calls`)" if name == "content" and message["role"] == "assistant" else ""
            raise RowError(f"expected a string{also}, found {describe(text)}", f"{place}.{name}")
        reject_surrogates(text, f"{place}.{name}")
    return message


class Encoder:
    """Encodes validated rows of one format into token documents."""

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
        if not answer:  # nothing to learn but the end token
            return as_ints([]), as_ints([])
        tokens = _with_prefix(self._prefix, prompt + answer)
        prompt_length = len(tokens) - len(answer)
        if self._eos is not None and tokens[-1:] != [self._eos]:
            tokens.append(self._eos)
        skipped = max(1, prompt_length)  # the first token has no context to be predicted from
        return as_ints(tokens), as_ints([skipped, len(tokens) - skipped] if len(tokens) > skipped else [])


def _instruction(row: Row) -> str:
    system = f"{row['system']}\n\n" if row.get("system") else ""
    earlier = "".join(
        f"### Instruction:\n{instruction}\n\n### Response:\n{response}\n\n"
        for instruction, response in row.get("history", ())
    )
    extra = f"### Input:\n{row['input']}\n\n" if row.get("input") else ""
    return f"{system}{earlier}### Instruction:\n{row['instruction']}\n\n{extra}### Response:\n"


def special_prefix(tokenizer: Any) -> list[int]:
    """Return the special tokens that the tokenizer puts before a text: usually one BOS token, or none."""
    if not tokenizer.is_fast:
        raise UnsupportedModelError(
            f"The tokenizer {type(tokenizer).__name__} has no fast (Rust) implementation.",
            fix="Convert it to a tokenizer.json, or choose another one with model.tokenizer.",
        )
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a", add_special_tokens=True)["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return list(full[:start])
    raise ModelError(
        "The tokenizer tokenizes text differently with special tokens, so documents have no well-defined prefix.",
        fix="Choose another tokenizer with model.tokenizer.",
    )


def _with_prefix(prefix: list[int], ids: list[int]) -> list[int]:
    """Prepend the prefix unless it is already there: pre-rendered text often starts with a BOS token."""
    return list(ids) if ids[: len(prefix)] == prefix else prefix + ids


def render_prompt(format: str, prompt: str, tokenizer: Any) -> list[int]:
    """Tokenize a user's prompt exactly like a prompt in training data of that format.

    For `instruction` the prompt is the instruction (without input), for `messages` a single user turn.
    """
    if format == "messages":
        return ChatEncoder(tokenizer).prompt([{"role": "user", "content": prompt}])
    text = _instruction({"instruction": prompt}) if format == "instruction" else prompt
    return _with_prefix(special_prefix(tokenizer), plain_ids(tokenizer, [text])[0])
