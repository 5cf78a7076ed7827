"""Processes of a pipeline wait for each other no longer than they have to, by the order in which they run stages.

Counting is the benchmark's (`benchmarks/ranks/pipeline_order.py`), which publishes the same for more processes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pantheraml.parallel.pipeline import bubble_share
from tests.distributed.launching import run_ranks

PROCESSES = 4
CASES = [
    {"processes": processes, "micro_batches": micro_batches, "stages_per_process": stages}
    for processes, micro_batches, stages in ((2, 2, 1), (2, 8, 1), (2, 4, 2), (4, 4, 1), (4, 8, 1), (4, 8, 2))
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("bubble")
    run_ranks("bubble_ranks", PROCESSES, folder, json.dumps(CASES))
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: "-".join(map(str, CASES[number].values())))
def test_waiting_is_what_theory_says(found: Any, number: int) -> None:
    case, counted = CASES[number], found[0][number]
    work = 2 * case["stages_per_process"] * case["micro_batches"]
    assert counted["works"] == [work] * case["processes"], "every stage sees every micro-batch, there and back"
    for name, turns in (("idle_turns", 2), ("idle_turns_if_backward_takes_two", 3)):
        step = turns * work // 2
        for waited in counted[name]:
            assert waited == turns * (case["processes"] - 1)
            assert waited / (waited + step) == pytest.approx(bubble_share(**case), rel=1e-12)


def test_counting_sees_stages_that_wait_for_each_other(found: Any) -> None:
    """Four micro-batches, one after another through two stages: of four turns each process works in two."""
    assert found[1] == [8, 8]
