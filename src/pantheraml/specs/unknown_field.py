"""What to do about a field that a config class does not have."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def fields_hint(unknown: Iterable[str], known: Iterable[str]) -> str:
    """Return the nearest known field of each unknown one, or all known ones if one has none."""
    names = list(known)
    nearest = [difflib.get_close_matches(name, names, n=1, cutoff=0.6) for name in unknown]
    if not nearest or not all(nearest):
        return f"Use one of its fields: {', '.join(names)}."
    return f"Did you mean {', '.join(f'`{match[0]}`' for match in nearest)}?"
