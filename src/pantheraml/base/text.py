"""Escape control characters in text that is printed to a terminal.

Escape sequences from a data file or a model can recolor the terminal, change its title or move the cursor, and
bidirectional marks can reorder words, so that the output misleads. Such characters are printed as their codes.
"""

from __future__ import annotations

import re

# All control characters except tab and line feed (C0, DEL, C1), line and paragraph separators, bidirectional marks, and
# lone surrogates, which cannot be encoded.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


def printable(text: object) -> str:
    """Return the text with control characters replaced by their codes, such as \\x1b."""
    return _CONTROLS.sub(_code, str(text))


def _code(match: re.Match[str]) -> str:
    number = ord(match.group())
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
