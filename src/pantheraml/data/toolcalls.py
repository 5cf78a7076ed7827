"""Convert tool calls to the form that a chat template renders correctly.

Two things come in two forms, and templates differ in which they support:

- the content of a turn that only calls tools: null or "". Some templates test for null to detect a tool call; others
  print it, and a null becomes the word None.
- the arguments of a call: an object, as in transformers, or a JSON string, as in the OpenAI API. A template that dumps
  objects as JSON turns a string into a quoted string; one that prints a string prints an object as a Python dict.

So each conversation with tool calls is tried in all forms, and rejected if none is rendered correctly.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

from pantheraml.data.bounds import MAX_NESTING, too_deep
from pantheraml.data.rows import Row, RowError, describe, excerpt

Render = Callable[[list[Row]], str]

# private-use characters, absent from data: they show where a template prints the content or the name of a call
_NULL_MARK = "\ue000null\ue000"
_NAME_MARK = "\ue000call{}\ue000"

_FIX = "Use a tokenizer whose chat template renders tool calls (model.tokenizer)."


def calls_tools(message: Row) -> bool:
    """Return whether a message is an assistant turn with tool calls, which needs no content."""
    return message["role"] == "assistant" and bool(message.get("tool_calls") or message.get("function_call"))


def parse_tools(value: Any, field: str) -> list[Row] | None:
    """Parse tools or tool calls: a list of objects, or such a list as JSON; None if empty."""
    listed = value
    if isinstance(value, str):
        listed = parse_json(value, field) if value.strip() else None
    if listed is None:
        return None
    if not isinstance(listed, list):
        raise RowError(f"expected a list of objects, or the JSON of one, found {describe(value)}", field)
    tools = [parse_json(tool, field) if isinstance(tool, str) else tool for tool in listed]
    for tool in tools:
        if not isinstance(tool, dict):
            raise RowError(f"expected a list of objects, found in it {describe(tool)}", field)
    return tools or None


def parse_json(text: str, field: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise RowError(f"expected JSON, found {describe(text)}", field) from err
    if too_deep(value):
        raise RowError(f"expected at most {MAX_NESTING} levels of lists and objects, found more", field)
    return value


def fit_to_template(messages: list[Row], render: Render) -> list[Row]:
    """Return the messages in the form that the template behind `render` renders correctly; RowError if none is."""
    if not any(message.get("tool_calls") or message.get("function_call") for message in messages):
        return messages
    problem: RowError | None = None
    for content in (None, ""):
        for convert in (_as_object, _as_text):
            form = _with_arguments(_with_empty_content(messages, content), convert)
            try:
                _check_rendering(form, render)
            except RowError as err:
                problem = problem or err
            else:
                return form
    assert problem is not None
    raise problem


def _check_rendering(messages: list[Row], render: Render) -> None:
    """Raise RowError if the template drops a call, prints null as a word, or prints arguments as Python."""
    names = called_functions(messages)
    messages = _with_name_marks(messages)
    text = render(messages)
    for name, mark in zip(names, called_functions(messages), strict=True):
        if mark not in text and json.dumps(mark)[1:-1] not in text:
            raise RowError(
                f"expected a chat template that renders tool calls; this one drops a call of `{excerpt(name)}`",
                "messages",
                fix=_FIX,
            )
    if any(repr(arguments) in text for arguments in _arguments(messages) if isinstance(arguments, dict)):
        raise RowError(
            "expected a chat template that renders tool calls as JSON; this one prints Python", "messages", fix=_FIX
        )
    if any(message["content"] is None for message in messages):
        printed = render(_with_empty_content(messages, _NULL_MARK))
        if _NULL_MARK in printed and text == printed.replace(_NULL_MARK, "None"):
            raise RowError(
                "expected a chat template that accepts null content; this one prints it", "messages", fix=_FIX
            )


def _with_empty_content(messages: list[Row], content: str | None) -> list[Row]:
    """Replace empty content of messages with tool calls by `content`."""
    return [
        message | {"content": content} if not message["content"] and calls_tools(message) else message
        for message in messages
    ]


def called_functions(messages: list[Row]) -> list[str]:
    """Return the names of the functions that the messages call."""
    return [str(call["name"]) for call in _calls(messages) if "name" in call]


def _calls(messages: list[Row]) -> Iterator[Row]:
    for message in messages:
        for call in message.get("tool_calls") or []:
            inner = call.get("function")
            yield inner if isinstance(inner, dict) else call
        if isinstance(message.get("function_call"), dict):  # OpenAI's older form of a single call
            yield message["function_call"]


def _with_arguments(messages: list[Row], convert: Callable[[Any], Any]) -> list[Row]:
    def converted(call: Row) -> Row:
        return call | {"arguments": convert(call["arguments"])} if "arguments" in call else call

    return [_with_changed_calls(message, converted) for message in messages]


def _with_name_marks(messages: list[Row]) -> list[Row]:
    """Replace the name of each call by a unique mark: the name itself may also occur in the text of a message."""
    marks = map(_NAME_MARK.format, itertools.count())

    def marked(call: Row) -> Row:
        return call | {"name": next(marks)} if "name" in call else call

    return [_with_changed_calls(message, marked, older=True) for message in messages]


def _with_changed_calls(message: Row, change: Callable[[Row], Row], *, older: bool = False) -> Row:
    """Apply `change` to every call; with `older`, also to that of `function_call`."""

    def changed(call: Row) -> Row:
        inner = call.get("function")
        return call | {"function": change(inner)} if isinstance(inner, dict) else change(call)

    if message.get("tool_calls"):
        message = message | {"tool_calls": [changed(call) for call in message["tool_calls"]]}
    if older and isinstance(message.get("function_call"), dict):
        message = message | {"function_call": change(message["function_call"])}
    return message


def _arguments(messages: list[Row]) -> list[Any]:
    return [call["arguments"] for call in _calls(messages) if call.get("arguments")]


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) and not too_deep(value) else arguments


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments
