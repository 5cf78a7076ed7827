"""Text from files and models, on its way to a terminal.

A terminal obeys what it is sent: escape sequences recolour, retitle, move the cursor, and with it what people believe
that they read; marks of writing direction turn words round. Such characters are shown by their codes instead.
"""

from __future__ import annotations

import re

# All control characters but tab and line feed (C0, DEL, C1), line and paragraph separators, marks of writing direction,
# and halves of surrogate pairs, which cannot be encoded at all.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


def printable(text: object) -> str:
    """The text with every character that a terminal would obey written as its code, such as \\x1b."""
    return _CONTROLS.sub(_code, str(text))


def _code(found: re.Match[str]) -> str:
    number = ord(found.group())
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
