"""Columns of each row format, and the validation of single rows, without a tokenizer.

The service checks uploaded rows by it, so nothing here imports transformers. What a row becomes: see `formats`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

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
TEXT_WORDS = 64
ACCEPTED = "`text`, `prompt` + `completion`, `messages`, or `instruction` (+ `input`) + `output`"


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


def split_row(format: str, row: Row) -> tuple[Row, str, str]:
    """Return a validated row without what is learned last, its prompt for people, and what is learned after it.

    Of plain text, the first half of the words is the prompt, at most `TEXT_WORDS` of them.
    """
    if format == "messages":
        messages = row["messages"]
        last = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
        before = messages[:last]
        if not before:
            raise RowError("expected a message before the assistant's, found none", "messages")
        one = len(before) == 1
        shown = before[0]["content"] if one else "\n\n".join(f"{each['role']}: {each['content']}" for each in before)
        return {**row, "messages": before}, shown, _answer(messages[last])
    if format == "prompt":
        return {"prompt": row["prompt"]}, row["prompt"], row["completion"]
    if format == "instruction":
        shown = "\n\n".join(row[name] for name in ("system", "instruction", "input") if row.get(name))
        return {name: value for name, value in row.items() if name != "output"}, shown, row["output"]
    words = re.findall(r"\S+\s*", row["text"])
    count = max(1, min(TEXT_WORDS, len(words) // 2))
    begin = "".join(words[:count]).rstrip()
    return {"text": begin}, begin, "".join(words[count:])


def _answer(message: Row) -> str:
    return "\n".join([*filter(None, [message["content"]]), *map(json.dumps, message.get("tool_calls", ()))])


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
