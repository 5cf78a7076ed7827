"""Conversations of any common form to `role` and `content`.

A message may name its speaker and its text differently (ShareGPT: `from` and `value`), and roles differently (`human`,
`gpt`). Columns that hold conversations are found by their content and keep their name. Data in standard form is
returned as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pantheraml.base.errors import DataError
from pantheraml.data.rows import Row, join_names

_ROLE_KEYS = ("role", "from", "speaker", "sender", "author")
_CONTENT_KEYS = ("content", "value", "text", "message", "utterance")
_USUAL_COLUMNS = ("conversations", "messages", "conversation")
_STANDARD_ROLES = ("system", "user", "assistant", "tool", "developer")
_TOOL_ALIASES = ("tool", "function", "observation", "ipython", "function_response")
_PEEKED_ROWS = 100


def standardize_data_formats(
    dataset: Any,
    aliases_for_system: Sequence[str] = ("system",),
    aliases_for_user: Sequence[str] = ("user", "human", "input", "prompter"),
    aliases_for_assistant: Sequence[str] = ("gpt", "assistant", "output", "model", "bot", "chatgpt"),
    batch_size: int = 1000,
    num_proc: int | None = None,
) -> Any:
    """Return the data set with its conversations as lists of {role, content}; an unknown role is an error.

    Takes a datasets.Dataset, DatasetDict or IterableDataset, a list of rows, or a list of conversations.
    `batch_size`, `num_proc`: how the rows of a datasets.Dataset are mapped.
    """
    roles = {role: role for role in _STANDARD_ROLES} | dict.fromkeys(_TOOL_ALIASES, "tool")
    aliases = {"system": aliases_for_system, "user": aliases_for_user, "assistant": aliases_for_assistant}
    for role, names in aliases.items():
        roles |= dict.fromkeys(names, role)
    if isinstance(dataset, dict):  # a DatasetDict
        splits = {name: _standardize(split, roles, batch_size, num_proc) for name, split in dataset.items()}
        return type(dataset)(splits)
    return _standardize(dataset, roles, batch_size, num_proc)


standardize_sharegpt = standardize_data_formats


def _standardize(dataset: Any, roles: dict[str, str], batch_size: int, num_proc: int | None) -> Any:
    peeked = list(itertools.islice(dataset, _PEEKED_ROWS))
    if isinstance(dataset, list) and peeked and all(isinstance(row, list) for row in peeked):
        rows = [{"conversations": conversation} for conversation in dataset]
        return [row["conversations"] for row in _standardize(rows, roles, batch_size, num_proc)]
    convert = _Convert(_conversation_columns(peeked), roles)
    if isinstance(dataset, list):
        columns = ([row.get(name) for row in dataset] for name in convert.columns)
        if convert.is_standard(itertools.chain.from_iterable(columns)):
            return dataset
        return [{**row, **convert.row(row)} for row in dataset]
    if not hasattr(dataset, "__len__"):
        return dataset.map(convert.row)
    batches: Iterator[Row] = dataset.select_columns(convert.columns).iter(batch_size)
    if convert.is_standard(itertools.chain.from_iterable(itertools.chain.from_iterable(b.values() for b in batches))):
        return dataset
    return dataset.map(
        convert.batch, batched=True, batch_size=batch_size, num_proc=num_proc, desc="Standardizing conversations"
    )


def _conversation_columns(rows: list[Row]) -> list[str]:
    """Return the columns whose values are lists of messages."""
    if not rows:
        raise DataError("The data set is empty.", fix="Check the split and the filters that it was made with.")
    found = [name for name in rows[0] if any(_is_conversation(row.get(name)) for row in rows)]
    if found:
        return found
    for name in _USUAL_COLUMNS:
        first = next((value for row in rows if (value := row.get(name))), None)
        if isinstance(first, list) and isinstance(first[0], dict):
            raise DataError(
                f"The messages in `{name}` have the keys {join_names(first[0])}.",
                fix=f"Name the speaker {join_names(_ROLE_KEYS)}, and the text {join_names(_CONTENT_KEYS)}.",
            )
    raise DataError(
        f"No column has conversations; the columns are {join_names(rows[0])}.",
        fix="A conversation is a list of {role, content} or {from, value} messages.",
    )


def _is_conversation(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, dict) and _key(each, _ROLE_KEYS) and _key(each, _CONTENT_KEYS) for each in value)
    )


def _key(message: Row, names: Iterable[str]) -> str | None:
    """Return the first of these keys that has a value, else the first that is there: Arrow fills others with null."""
    there = [name for name in names if name in message]
    return next((name for name in there if message[name] is not None), there[0] if there else None)


class _Convert:
    """Converts the conversations of rows."""

    def __init__(self, columns: list[str], roles: dict[str, str]) -> None:
        self.columns = columns
        self._roles = roles

    def is_standard(self, conversations: Iterable[Any]) -> bool:
        """Return whether nothing is to be changed; DataError if there are unknown roles."""
        standard, unknown = True, dict[str, int]()
        for message in itertools.chain.from_iterable(each or () for each in conversations):
            role = message.get(_key(message, _ROLE_KEYS))
            if role not in self._roles:
                unknown[str(role)] = unknown.get(str(role), 0) + 1
            standard &= {"role", "content"} <= message.keys() and self._roles.get(message["role"]) == message["role"]
        if unknown:
            raise self._unknown_roles(unknown)
        return standard

    def batch(self, rows: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        return {name: [self._conversation(value) for value in rows[name]] for name in self.columns}

    def row(self, row: Row) -> Row:
        return {name: self._conversation(row[name]) for name in self.columns if name in row}

    def _conversation(self, messages: list[Row] | None) -> list[Row] | None:
        return None if messages is None else [self._message(message) for message in messages]

    def _message(self, message: Row) -> Row:
        role, content = _key(message, _ROLE_KEYS), _key(message, _CONTENT_KEYS)
        if role is None or content is None:
            raise DataError(
                f"A message has the keys {join_names(message)}, which name no speaker or no text.",
                fix=f"Name the speaker {join_names(_ROLE_KEYS)}, and the text {join_names(_CONTENT_KEYS)}.",
            )
        if message[role] not in self._roles:
            raise self._unknown_roles({str(message[role]): 1})
        others = {name: value for name, value in message.items() if name not in (role, content, "role", "content")}
        return {"role": self._roles[message[role]], "content": message[content], **others}

    def _unknown_roles(self, unknown: Mapping[str, int]) -> DataError:
        listed = ", ".join(f"{name!r} ({count})" for name, count in unknown.items())
        return DataError(
            f"The data set has roles that are not known: {listed}.",
            fix=f"Rename them, or pass them as aliases_for_...; known are {', '.join(self._roles)}.",
        )
