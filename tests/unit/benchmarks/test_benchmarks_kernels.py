"""The kernel benchmark on a CPU: every op matches its reference, and missing results have a reason."""

from __future__ import annotations

import json

from tests.unit.benchmarks.conftest import Python

RUN = "import json, kernels\nprint(json.dumps(kernels.run(size='tiny')))"


def test_every_op_runs_and_agrees(python: Python) -> None:
    rows = json.loads(python(RUN).splitlines()[-1])["results"]
    errors = {(row["op"], row["implementation"]): row.get("relative_error") for row in rows}
    assert errors["linear_cross_entropy, trained head", "ours"] < 0.01
    assert all(error is None or error < 0.1 for error in errors.values())
    assert all(row.get("relative_error") is not None or row["reason"] for row in rows)
