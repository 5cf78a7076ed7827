"""The message of a config class that is given a wrong field in Python: what is wrong, and what to do about it.

It stays pydantic's ValidationError, which is a ValueError. Values of files and of the command line do not come here:
their readers say where a key was set.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
"""Types of error that pydantic has for a field that a class does not have."""

_FIX = ".\n  fix: "


def explained(err: ValidationError, owner: type) -> ValidationError:
    """Return the error with a fix in each of its messages."""
    lines: list[InitErrorDetails] = []
    for detail in err.errors(include_url=False):
        message, loc = detail["msg"].removeprefix("Value error, "), detail["loc"]
        if detail["type"] in UNKNOWN:
            message = f"there is no field `{loc[-1]}`{_FIX}{_hint(owner, tuple(map(str, loc)))}"
        elif "fix:" not in message:
            message += f"{_FIX}`pantheraml schema` shows every field, its type and meaning."
        error = PydanticCustomError(detail["type"], "{message}", {"message": message})
        lines.append(InitErrorDetails(type=error, loc=loc, input=detail["input"]))
    return ValidationError.from_exception_data(err.title, lines)


def without_fix(message: str) -> str:
    """Return what is wrong, for an error that has a fix of its own."""
    return message.removeprefix("Value error, ").partition(_FIX)[0]


def _hint(owner: type, loc: tuple[str, ...]) -> str:
    from pantheraml.specs.config_file import field_names, nearest_key  # which knows all sections, and imports them
    from pantheraml.specs.train import TrainConfig
    from pantheraml.specs.unknown_field import fields_hint

    sections = field_names(TrainConfig) or {}
    section = next((name for name, kind in sections.items() if kind is owner), None)
    key = loc if section is None else (section, *loc)
    near = nearest_key(key) if section is not None or owner is TrainConfig else None
    if near is not None:
        inside = near.rpartition(".")[0] == ".".join(key[:-1])
        return f"Did you mean `{near.rpartition('.')[2] if inside else near}`?"
    fields: dict[str, Any] = field_names(owner) or {}
    for part in loc[:-1]:
        fields = field_names(fields.get(part)) or {}
    return fields_hint(loc[-1:], fields)
