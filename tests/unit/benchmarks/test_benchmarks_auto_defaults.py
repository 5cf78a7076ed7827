"""The search that `auto` is compared with."""

from __future__ import annotations

import json

import pytest

from tests.unit.benchmarks.conftest import Python

COMPARED = """
import json, auto_defaults
rows = [
    {"task": "code", "auto": auto, "rate": rate, "rank": 16, "eval_loss": loss}
    for auto, rate, loss in ((True, 2e-4, 2.05), (False, 5e-5, 2.2), (False, 1e-3, 2.0), (False, 1e-2, 9.0))
]
rows += [{**row, "task": "manual", "eval_loss": row["eval_loss"] / (1.02 if row["auto"] else 1)} for row in rows]
print(json.dumps([len(auto_defaults.GRID), auto_defaults.compared(rows)]))
"""


def test_auto_is_compared_with_the_best_point(python: Python) -> None:
    points, lines = json.loads(python(COMPARED))
    assert points == 20
    assert lines == [
        ["code", "2.0500 (0.0002, rank 16)", "2.0000 (0.001, rank 16)", "3", "+2.50 %", "no"],
        ["manual", "2.0098 (0.0002, rank 16)", "2.0000 (0.001, rank 16)", "3", "+0.49 %", "yes"],
    ]


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_it_runs(python: Python) -> None:
    code = "import json, auto_defaults\nprint(json.dumps(auto_defaults.run(size='tiny', points=1)))"
    found = json.loads(python(code).splitlines()[-1])
    rows = found["results"]
    assert [(row["task"], row["auto"]) for row in rows] == [
        (task, auto) for task in ("code", "manual", "describe") for auto in (True, False)
    ]
    assert all(5 < row["eval_loss"] < 7 and row["bytes"] > 50_000 for row in rows), "about log(512)"
    assert len({row["bytes"] for row in rows}) == 3, "three kinds of text"
