"""Identifiers of what the service keeps: random, and never made into a path unless the database knows them."""

from __future__ import annotations

import secrets


def new_id(prefix: str) -> str:
    """Return `<prefix>-<24 random hexadecimal digits>`, as in `ftjob-0123456789abcdef01234567`."""
    return f"{prefix}-{secrets.token_hex(12)}"
