"""Identifiers of what the service keeps: random, and never made into a path unless the database knows them; those of
events are numbers."""

from __future__ import annotations

import re
import secrets


def new_id(prefix: str) -> str:
    """Return `<prefix>-<24 random hexadecimal digits>`, as in `ftjob-0123456789abcdef01234567`."""
    return f"{prefix}-{secrets.token_hex(12)}"


def number_of(name: str, prefix: str) -> int | None:
    """Number in an id such as `ftevent-12`, with or without the prefix; None: it is not such an id."""
    number = name.removeprefix(prefix)
    return int(number) if re.fullmatch("[0-9]{1,18}", number) else None
