"""The pipeline bubble matches theory, by the order in which ranks run their stages.

Counting is the benchmark's (`benchmarks/ranks/pipeline_order.py`), which publishes the same for more processes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pantheraml.planner.stages import bubble_fraction
from tests.distributed.launching import run_ranks

pytestmark = pytest.mark.extended

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
def test_pipeline_bubble_matches_theory(found: Any, number: int) -> None:
    case, counted = CASES[number], found[0][number]
    work = 2 * case["stages_per_process"] * case["micro_batches"]
    assert counted["works"] == [work] * case["processes"], "every stage runs every micro-batch forward and backward"
    for name, turns in (("idle_turns", 2), ("idle_turns_if_backward_takes_two", 3)):
        step = turns * work // 2
        for waited in counted[name]:
            assert waited == turns * (case["processes"] - 1)
            assert waited / (waited + step) == pytest.approx(bubble_fraction(**case), rel=1e-12)


def test_bubble_count_detects_a_sequential_pipeline(found: Any) -> None:
    """Four micro-batches in sequence through two stages: each rank is busy half of the time."""
    assert found[1] == [8, 8]
