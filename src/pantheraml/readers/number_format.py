"""Number formats shared by the progress bar and the report: counts, bytes, durations, losses. None is a dash."""

from __future__ import annotations

import math

UNKNOWN = "–"


def count(value: float | None) -> str:
    """1234 -> '1,234'; 12345678 -> '12.3 M'."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return str(value)
    for size, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:,.0f}"


def size(value: float | None) -> str:
    """Bytes in powers of 1024: 1536 -> '1.50 KiB'."""
    if value is None:
        return UNKNOWN
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def duration(value: float | None) -> str:
    """0.42 -> '0.42 s'; 75 -> '1:15'; 3700 -> '1:01:40'."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:.3g} s" if value < 60 else clock(value)


def clock(seconds: float) -> str:
    """Whole seconds, for a running clock: 2.4 -> '0:02'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def loss(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.4f}"


def small(value: float | None) -> str:
    """Learning rates and norms: three significant digits, with an exponent if tiny or huge."""
    return UNKNOWN if value is None else f"{value:.3g}"


def share(value: float | None) -> str:
    """0.9876 -> '98.8 %'."""
    return UNKNOWN if value is None else f"{100 * value:.1f} %"
