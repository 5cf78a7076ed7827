"""Cost of an event in the training process: build, validate, serialize and append one `train.step` event."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from table import Column, Table

LIMIT_US = 20.0


def run(events: int = 5_000, rounds: int = 7) -> dict[str, Any]:
    """Measure microseconds per event, median over `rounds`."""
    from pantheraml.base.event_stream import EventWriter
    from pantheraml.base.events import TrainStep

    took = []
    with tempfile.TemporaryDirectory() as folder, EventWriter(Path(folder)) as emit:
        for _ in range(rounds):
            begin = time.perf_counter()
            for step in range(events):
                emit(
                    TrainStep(
                        step=step,
                        epoch=step / events,
                        loss=2.0 + 1 / (step + 1),
                        learning_rate=1e-4,
                        grad_norm=1.0,
                        tokens=8_192,
                        target_tokens=8_000,
                        seconds=0.1,
                        tokens_per_second=81_920.0,
                        memory_bytes=40_000_000_000,
                    )
                )
            took.append((time.perf_counter() - begin) / events * 1e6)
    result = {"events": events, "microseconds": round(statistics.median(took), 2), "slowest": round(max(took), 2)}
    return {"parameters": {"events": events, "rounds": rounds}, "results": result}


TABLE = Table(
    title="Writing an event",
    how=f"Build, validate and append a `train.step` event to events.jsonl; limit {LIMIT_US:g} us.",
    columns=(
        Column("events", "events"),
        Column("us per event, median", "microseconds"),
        Column("slowest round", "slowest"),
    ),
)
