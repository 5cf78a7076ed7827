"""docs/conformance.md: every promise has one row, and everything it names exists."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/conformance.md"
PROMISES = {"S0": 121, "S1": 137, "S2": 82, "S3": 93, "S4": 167}
CONFLICTS = 28
STATES = ("done", "partly", "not yet", "refused")
NOTHING = "–"


class Row(NamedTuple):
    items: str
    promise: str
    state: str
    code: str
    test: str


ROWS = [
    Row(*(cell.strip() for cell in line.strip().strip("|").split("|")))
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if re.match(r"\| (S\d-\d|C\d)", line)
]


def items(row: Row) -> Iterator[str]:
    for part in row.items.split(", "):
        first, _, last = part.partition("..")
        if not last:
            yield first
            continue
        document, begin = first.split("-")
        assert last.startswith(f"{document}-"), part
        yield from (f"{document}-{number:03d}" for number in range(int(begin), int(last.split("-")[1]) + 1))


def test_every_promise_has_one_row() -> None:
    counted = Counter(item for row in ROWS for item in items(row))
    expected = {f"{document}-{number:03d}" for document, count in PROMISES.items() for number in range(1, count + 1)}
    expected |= {f"C{number}" for number in range(1, CONFLICTS + 1)}
    assert counted == dict.fromkeys(expected, 1)


@pytest.mark.parametrize("document", [*PROMISES, "C"])
def test_rows_are_complete_and_name_what_exists(document: str) -> None:
    rows = [row for row in ROWS if row.items.startswith(document)]
    assert rows
    problems = {row.items: found for row in rows if (found := list(problems_of(row)))}
    assert not problems


def problems_of(row: Row) -> Iterator[str]:
    state, _, reason = row.state.partition(":")
    if state.split(";")[0] not in STATES:
        yield f"{state} is not a state"
    if state in ("partly", "refused") and not reason:
        yield "must say what is missing, or why"
    if state == "not yet" and (row.code, row.test) != (NOTHING, NOTHING):
        yield "is not there yet, but names code or tests"
    if state not in ("not yet", "refused") and NOTHING in (row.code, row.test):
        yield "names no code or no test"
    for name in re.findall(r"`([^`]+)`", row.code):
        if not exists(name):
            yield f"{name} does not exist"
    for name in re.findall(r"`([^`]+)`", row.test):
        path, _, function = name.partition("::")
        file = ROOT / path
        if not path.startswith("tests/") or not file.is_file():
            yield f"{name} is not a test file"
        elif function and f"\ndef {function}(" not in file.read_text(encoding="utf-8"):
            yield f"{name} is not a test"


def exists(name: str) -> bool:
    """Whether `name` is a file or folder of the project, or can be imported."""
    if not name.startswith("pantheraml."):
        return (ROOT / name).exists()
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_counts_match_the_rows() -> None:
    counted = Counter(re.split("[:;]", row.state)[0] for row in ROWS for _ in items(row))
    stated = dict(
        re.findall(r"^\| (done|partly|not yet|refused) \| (\d+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert {state: int(number) for state, number in stated.items()} == counted
