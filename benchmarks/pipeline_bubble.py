"""Pipeline bubble: idle slots, counted from the order in which real processes run their stages, and theory.

Slots are counted, not timed, so the numbers do not depend on the hardware.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ranks.launch import run_ranks
from table import Column, Table, percent

CASES = ((1, 1), (2, 1), (4, 1), (8, 1), (4, 2))
"""Micro-batches per process, and stages per process: the columns of docs/parallelism.md."""

TABLE = Table(
    title="Pipeline bubble",
    how="Idle slots of a pipeline process in one step, where a slot is one stage's forward or backward over one"
    " micro-batch and sends take none: counted from the order in which real processes ran their stages (torch's 1F1B"
    " and interleaved 1F1B schedules), and theory. The share is that of the whole step.",
    columns=(
        Column("processes", "processes"),
        Column("stages per process", "stages_per_process"),
        Column("micro-batches", "micro_batches"),
        Column("idle slots", "idle_turns"),
        Column("theory", "expected_idle_turns"),
        Column("share", "share", percent),
        Column("theory", "expected_share", percent),
    ),
)


def run(*, processes: Sequence[int] = (2, 4, 8)) -> dict[str, Any]:
    cases = [
        {"processes": count, "micro_batches": multiple * count, "stages_per_process": stages}
        for count in processes
        for multiple, stages in CASES
    ]
    found = run_ranks("pipeline_order", {"cases": cases}, processes=max(processes))
    rows = [_row(found=one, **case) for case, one in zip(cases, found, strict=True)]
    return {"parameters": {"processes": list(processes)}, "results": rows}


def _row(*, processes: int, micro_batches: int, stages_per_process: int, found: dict[str, Any]) -> dict[str, Any]:
    """Result row of the process that idles longest."""
    idle, others = max(found["idle_turns"]), processes - 1
    work = 2 * stages_per_process * micro_batches
    assert set(found["works"]) == {work}, "every stage sees every micro-batch, forward and backward"
    return {
        "processes": processes,
        "stages_per_process": stages_per_process,
        "micro_batches": micro_batches,
        "idle_turns": idle,
        "expected_idle_turns": 2 * others,
        "share": idle / (idle + work),
        "expected_share": others / (stages_per_process * micro_batches + others),
    }
