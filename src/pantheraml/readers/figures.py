"""How readers write numbers: counts, bytes, durations, losses. One place, so that the bar and the report agree.

Every function takes what an event may hold, including 'nan' as a string and None, and answers with short text; an
unknown number is a dash.
"""

from __future__ import annotations

import math
from typing import Any

from pantheraml.base.events import number

UNKNOWN = "–"


def count(value: Any) -> str:
    """1234 -> '1,234'; 12345678 -> '12.3 M'."""
    found = number(value)
    if found is None:
        return UNKNOWN
    if not math.isfinite(found):
        return str(found)
    for size, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(found) >= size:
            return f"{found / size:.3g} {name}"
    return f"{found:,.0f}"


def size(value: Any) -> str:
    """Bytes in powers of 1024, as GPU tools show them: 1536 -> '1.50 KiB'."""
    found = number(value)
    if found is None:
        return UNKNOWN
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(found) < 1024:
            return f"{found:.0f} B" if unit == "B" else f"{found:.3g} {unit}"
        found /= 1024
    return f"{found:.3g} TiB"


def duration(value: Any) -> str:
    """0.42 -> '0.42 s'; 75 -> '1:15'; 3700 -> '1:01:40'."""
    found = number(value)
    if found is None or not math.isfinite(found):
        return UNKNOWN
    return f"{found:.3g} s" if found < 60 else clock(found)


def clock(seconds: float) -> str:
    """Whole seconds, for clocks that tick: 2.4 -> '0:02'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def loss(value: Any) -> str:
    found = number(value)
    return UNKNOWN if found is None else f"{found:.4f}"


def small(value: Any) -> str:
    """Learning rates and norms: three significant digits, an exponent where the number is tiny or huge."""
    found = number(value)
    return UNKNOWN if found is None else f"{found:.3g}"


def share(value: Any) -> str:
    """0.9876 -> '98.8 %'."""
    found = number(value)
    return UNKNOWN if found is None else f"{100 * found:.1f} %"
