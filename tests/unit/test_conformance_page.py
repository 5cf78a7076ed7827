"""docs/conformance.md: every promise is in it once, and whatever it names is there."""

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
    where: str
    shown_by: str


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


def test_every_promise_is_there_once() -> None:
    counted = Counter(item for row in ROWS for item in items(row))
    wanted = {f"{document}-{number:03d}" for document, count in PROMISES.items() for number in range(1, count + 1)}
    wanted |= {f"C{number}" for number in range(1, CONFLICTS + 1)}
    assert counted == dict.fromkeys(wanted, 1)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.items)
def test_a_row(row: Row) -> None:
    state, _, reason = row.state.partition(":")
    assert state.split(";")[0] in STATES
    if state in ("partly", "refused"):
        assert reason, "says what is lacking, or why"
    if state == "not yet":
        assert (row.where, row.shown_by) == (NOTHING, NOTHING)
    elif state != "refused":
        assert NOTHING not in (row.where, row.shown_by)
    for name in re.findall(r"`([^`]+)`", row.where):
        assert exists(name), name
    for name in re.findall(r"`([^`]+)`", row.shown_by):
        path, _, function = name.partition("::")
        assert path.startswith("tests/")
        assert not function or f"\ndef {function}(" in (ROOT / path).read_text(encoding="utf-8"), name
        assert (ROOT / path).is_file(), name


def exists(name: str) -> bool:
    """A file or folder of the project, or a name that can be imported."""
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


def test_the_numbers_of_the_page_are_those_of_its_rows() -> None:
    counted = Counter(re.split("[:;]", row.state)[0] for row in ROWS for _ in items(row))
    said = dict(
        re.findall(r"^\| (done|partly|not yet|refused) \| (\d+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert {state: int(number) for state, number in said.items()} == counted
