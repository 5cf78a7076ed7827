"""The result of a run: JSON, and Markdown tables by category, by cause, and of what is not supported."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from tools.notebooks.verdicts import OUTCOMES, Result


def category_table(results: Sequence[Result]) -> str:
    """Return the counts of outcomes by category, with a last row for all."""
    lines = ["| category | " + " | ".join(OUTCOMES.values()) + " | notebooks |", "|---|" + "--:|" * (len(OUTCOMES) + 1)]
    for category in sorted({result.category for result in results}):
        lines.append(_counts(category, [result for result in results if result.category == category]))
    return "\n".join([*lines, _counts("**all**", results)])


def _counts(title: str, results: Sequence[Result]) -> str:
    counts = Counter(result.outcome for result in results)
    return f"| {title} | " + " | ".join(str(counts[outcome]) for outcome in OUTCOMES) + f" | {len(results)} |"


def reasons_table(results: Iterable[Result], *, outcome: str) -> str:
    """Return the reasons of one outcome and the notebooks of each, the most frequent first."""
    by_reason: dict[str, list[str]] = {}
    for result in results:
        if result.outcome == outcome:
            by_reason.setdefault(cause_of(result), []).append(result.name)
    if not by_reason:
        return "None."
    rows = sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0]))
    lines = [f"| {_cell(reason)} | {len(names)} | {_cell(', '.join(names))} |" for reason, names in rows]
    return "\n".join(["| reason | | notebooks |", "|---|--:|---|", *lines])


def cause_of(result: Result) -> str:
    """Return the reason without what differs between notebooks: numbers, addresses, names of files."""
    text = re.sub(r"0x[0-9a-f]+", "0x", result.reason)
    return re.sub(r"\d+", "N", text)[:200] if result.outcome == "error" else text


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
