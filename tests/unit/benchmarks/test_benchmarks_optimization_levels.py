"""The benchmark of optimization levels runs, and the page tells its newest figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.benchmarks.conftest import BENCHMARKS, Python

LEVELS = """
import json, optimization_levels
print(json.dumps(optimization_levels.run(width=64, steps=3, rounds=1)))
"""


@pytest.mark.extended
def test_every_level_is_timed(python: Python) -> None:
    rows = json.loads(python(LEVELS).splitlines()[-1])["results"]
    assert [row["level"] for row in rows] == ["none", "basic", "advanced", "ultra"]
    assert all(row["milliseconds"] > 0 for row in rows)
    assert rows[0]["speedup"] == 1


def test_the_page_tells_the_newest_figure() -> None:
    newest = max((BENCHMARKS / "results").glob("optimization_levels-*.json"))
    (basic,) = [row for row in json.loads(newest.read_text())["results"] if row["level"] == "basic"]
    page = (Path(BENCHMARKS).parent / "docs" / "own-loop.md").read_text()
    assert f"`basic` is {basic['speedup']:.2f} times as fast as" in page
