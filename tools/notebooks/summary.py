"""What a run of all notebooks came to, small enough to keep, and the section of a page that shows it."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import itertools
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tools.notebooks.verdicts import OUTCOMES, Result

START, END = "<!-- notebooks: made by tools/run_notebooks.py -->", "<!-- end of notebooks -->"
_LIBRARIES = ("torch", "transformers", "trl", "peft", "datasets", "torchvision", "timm")


def summarize(results: Sequence[Result], commit: str) -> dict[str, Any]:
    """Return counts by category, and the reasons of what did not run; `commit`: that of the notebooks."""
    categories = sorted({result.category for result in results})
    return {
        "date": datetime.date.today().isoformat(),
        "notebooks": commit,
        "versions": _versions(),
        "counts": {category: _counts(results, category) for category in categories},
        "reasons": {outcome: _reasons(results, outcome) for outcome in OUTCOMES if outcome != "ok"},
        "steps": sum(len(result.losses) for result in results),
        "refused_saves": sorted({_save_kind(save) for result in results for save in result.refused}),
    }


def _versions() -> dict[str, str]:
    found = {name: importlib.metadata.version(name) for name in _LIBRARIES if importlib.util.find_spec(name)}
    return {"python": platform.python_version(), **found}


def _counts(results: Sequence[Result], category: str) -> dict[str, int]:
    counted = Counter(result.outcome for result in results if result.category == category)
    return {outcome: counted[outcome] for outcome in OUTCOMES}


def _reasons(results: Sequence[Result], outcome: str) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for result in sorted(results, key=lambda each: each.name.lower()):
        if result.outcome == outcome:
            reasons.setdefault(result.reason, []).append(result.name)
    return dict(sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0])))


def _save_kind(save: str) -> str:
    """Return what is not supported in a save, without what differs between notebooks."""
    error = save.partition("): ")[2] or save
    gguf = re.search(r"(?:type '|This )(\w+)'? (?:model )?cannot be converted to GGUF", error)
    if gguf:
        return f"GGUF of {gguf[1]}"
    rounded = re.search(r"(\w+) cannot be saved in nf4", error)
    if rounded:
        return f"merged_4bit of {rounded[1]}"
    layer = re.search(r"cannot be merged: it is over an? (\w+)", error)
    return f"merging adapters over {layer[1]}" if layer else error.partition(" is not supported")[0]


def page_section(summary: Mapping[str, Any]) -> str:
    """Return the Markdown between the markers of a page."""
    counts = summary["counts"]
    total = {outcome: sum(each[outcome] for each in counts.values()) for outcome in OUTCOMES}
    shown = [outcome for outcome in OUTCOMES if outcome != "error" or total["error"]]
    versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    commit = summary["notebooks"]
    address = f"https://github.com/unslothai/notebooks/tree/{commit}/nb"
    lines = [
        f"{sum(total.values())} distinct notebooks of [unslothai/notebooks]({address}) at `{commit[:10]}`,",
        f"run on {summary['date']} on a CPU by `tools/run_notebooks.py`: with the import changed, tiny random models,",
        f"synthetic data and two steps per training ({summary['steps']} in all, each with a finite loss). The cells",
        f"that save are run, too. {versions}.",
        "",
        "| notebooks | " + " | ".join(OUTCOMES[outcome] for outcome in shown) + " |",
        "|---|" + "--:|" * len(shown),
    ]
    for category, each in [*counts.items(), ("**all**", total)]:
        lines.append(f"| {category} | " + " | ".join(str(each[outcome]) for outcome in shown) + " |")
    for outcome in shown:
        reasons = summary["reasons"].get(outcome)
        if reasons:
            lines += ["", f"{OUTCOMES[outcome].capitalize()}:", ""]
            lines += [f"- {_text(reason)} ({len(names)})" for reason, names in reasons.items()]
    if summary["refused_saves"]:
        lines += ["", "Saves that are refused, each with an error that says so:", ""]
        grouped = itertools.groupby(summary["refused_saves"], key=lambda kind: kind.rpartition(" ")[0])
        for what, kinds in grouped:
            lines.append(f"- {what} ".rstrip() + " " + ", ".join(f"`{kind.rpartition(' ')[2]}`" for kind in kinds))
    return "\n".join(lines)


def _text(reason: str) -> str:
    return reason.replace("<", "&lt;").replace("|", "\\|")


def with_section(page: str, section: str) -> str:
    """Return the page with `section` between its markers."""
    pattern = re.compile(re.escape(START) + r".*?" + re.escape(END), re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"the page has no {START}")
    return pattern.sub(lambda _: f"{START}\n{section}\n{END}", page)
