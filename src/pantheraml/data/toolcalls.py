"""Tools and their calls in the form that a chat template writes rightly.

Two things are written in two ways, and templates differ in which they take:

- the content of a turn that only calls tools: null or "". Some templates ask whether it is null to know that tools are
  called; others print it, and a null becomes the word None.
- the arguments of a call: an object, as transformers has it, or a string of JSON, as the OpenAI API has it. A template
  that turns objects into JSON makes a quoted string of a string; one that prints a string prints an object as Python.

So each conversation that has them is tried in both forms, and refused where neither is written rightly.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

from pantheraml.data.bounds import NESTING, too_deep
from pantheraml.data.rows import Row, RowError, brief, kind_of

Render = Callable[[list[Row]], str]

# Of private use: no data holds them, so where they stand in a text, the template printed a content or a call's name.
_NULL = "\ue000null\ue000"
_NAME = "\ue000call{}\ue000"

_TODO = "Use a tokenizer whose chat template writes tool calls (model.tokenizer)."


def may_be_silent(message: Row) -> bool:
    """Whether a message needs no content: it calls tools."""
    return message["role"] == "assistant" and bool(message.get("tool_calls") or message.get("function_call"))


def checked_tools(value: Any, field: str) -> list[Row] | None:
    """A column of tools or calls, as a list of objects or as the JSON of one; None where there are none."""
    listed = value
    if isinstance(value, str):
        listed = parsed(value, field) if value.strip() else None
    if listed is None:
        return None
    if not isinstance(listed, list):
        raise RowError(f"expected a list of objects, or the JSON of one, found {kind_of(value)}", field)
    tools = [parsed(tool, field) if isinstance(tool, str) else tool for tool in listed]
    for tool in tools:
        if not isinstance(tool, dict):
            raise RowError(f"expected a list of objects, found in it {kind_of(tool)}", field)
    return tools or None


def parsed(text: str, field: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise RowError(f"expected JSON, found {kind_of(text)}", field) from err
    if too_deep(value):
        raise RowError(f"expected at most {NESTING} levels of lists and objects, found more", field)
    return value


def fitted(messages: list[Row], render: Render) -> list[Row]:
    """The messages in the form that the template behind `render` writes rightly; RowError where there is none."""
    if not any(message.get("tool_calls") or message.get("function_call") for message in messages):
        return messages
    problem: RowError | None = None
    for content in (None, ""):
        for convert in (_as_object, _as_text):
            form = _with_arguments(_with_silence(messages, content), convert)
            try:
                _refuse_misprints(form, render)
            except RowError as err:
                problem = problem or err
            else:
                return form
    assert problem is not None
    raise problem


def _refuse_misprints(messages: list[Row], render: Render) -> None:
    """Raise unless the template writes every call, no null as a word, and no arguments as Python."""
    names = called(messages)
    messages = _with_names(messages)
    text = render(messages)
    for name, mark in zip(names, called(messages), strict=True):
        if mark not in text and json.dumps(mark)[1:-1] not in text:
            raise RowError(
                f"expected a chat template that writes tool calls; this one leaves out a call of `{brief(name)}`",
                "messages",
                todo=_TODO,
            )
    if any(repr(arguments) in text for arguments in _arguments(messages) if isinstance(arguments, dict)):
        raise RowError(
            "expected a chat template that writes tool calls as JSON; this one prints Python", "messages", todo=_TODO
        )
    if any(message["content"] is None for message in messages):
        printed = render(_with_silence(messages, _NULL))
        if _NULL in printed and text == printed.replace(_NULL, "None"):
            raise RowError(
                "expected a chat template that takes null for content; this one prints it", "messages", todo=_TODO
            )


def _with_silence(messages: list[Row], content: str | None) -> list[Row]:
    """With `content` where a message calls tools and says nothing."""
    return [
        message | {"content": content} if not message["content"] and may_be_silent(message) else message
        for message in messages
    ]


def called(messages: list[Row]) -> list[str]:
    """Names of the functions that the messages call."""
    return [str(call["name"]) for call in _calls(messages) if "name" in call]


def _calls(messages: list[Row]) -> Iterator[Row]:
    for message in messages:
        for call in message.get("tool_calls") or []:
            inner = call.get("function")
            yield inner if isinstance(inner, dict) else call
        if isinstance(message.get("function_call"), dict):  # the older form of one call
            yield message["function_call"]


def _with_arguments(messages: list[Row], convert: Callable[[Any], Any]) -> list[Row]:
    def changed(call: Row) -> Row:
        return call | {"arguments": convert(call["arguments"])} if "arguments" in call else call

    return [_with_calls(message, changed) for message in messages]


def _with_names(messages: list[Row]) -> list[Row]:
    """With a mark of its own as the name of each call: the name itself may stand in what a user says."""
    marks = map(_NAME.format, itertools.count())

    def changed(call: Row) -> Row:
        return call | {"name": next(marks)} if "name" in call else call

    return [_with_calls(message, changed, older=True) for message in messages]


def _with_calls(message: Row, change: Callable[[Row], Row], *, older: bool = False) -> Row:
    """With every call changed; `older`: that of `function_call`, too."""

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
