"""How long the processes of a pipeline wait for each other: counted in the order of the engine's own steps, and theory.

Turns are counted, not timed, so the numbers do not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ranks.launch import run_ranks
from table import Column, Table, percent

CASES = ((1, 1), (2, 1), (4, 1), (8, 1), (4, 2))
"""Micro-batches for each process, and stages on it: the columns of docs/parallelism.md."""

TABLE = Table(
    title="The bubble of a pipeline",
    how="Turns that a process of a pipeline waits in one step, where a turn is one stage's forward or backward pass"
    " over one micro-batch and sending takes none: counted from the order in which real processes ran their stages"
    " (torch's 1F1B and interleaved 1F1B schedules), beside theory. The share is that of the whole step.",
    columns=(
        Column("processes", "processes"),
        Column("stages of a process", "stages_per_process"),
        Column("micro-batches", "micro_batches"),
        Column("turns waited", "idle_turns"),
        Column("theory", "expected_idle_turns"),
        Column("share", "share", percent),
        Column("theory", "expected_share", percent),
    ),
)


def run(*, processes: Sequence[int] = (2, 4, 8)) -> dict[str, Any]:
    cases = [
        {"processes": count, "micro_batches": turns * count, "stages_per_process": stages}
        for count in processes
        for turns, stages in CASES
    ]
    found = run_ranks("pipeline_order", {"cases": cases}, processes=max(processes))
    rows = [_row(found=one, **case) for case, one in zip(cases, found, strict=True)]
    return {"parameters": {"processes": list(processes)}, "results": rows}


def _row(*, processes: int, micro_batches: int, stages_per_process: int, found: dict[str, Any]) -> dict[str, Any]:
    """Of the process that waited longest."""
    waited, waiting = max(found["idle_turns"]), processes - 1
    work = 2 * stages_per_process * micro_batches
    assert set(found["works"]) == {work}, "every stage sees every micro-batch, forward and backward"
    return {
        "processes": processes,
        "stages_per_process": stages_per_process,
        "micro_batches": micro_batches,
        "idle_turns": waited,
        "expected_idle_turns": 2 * waiting,
        "share": waited / (waited + work),
        "expected_share": waiting / (stages_per_process * micro_batches + waiting),
    }
