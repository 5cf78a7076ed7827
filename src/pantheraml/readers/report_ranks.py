"""The report's table of ranks: speed and memory of each, from the `train.ranks` events of the last start."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pantheraml.base.events import EventBase, TrainRanks, TrainStarted
from pantheraml.readers import number_format as figures
from pantheraml.readers.report_page import escape, table

SLOW = 1.2
"""Step time, relative to the median rank, from which a rank is named above the table."""

COLUMNS = ("rank", "tokens per step", "step time without waiting", "relative to the median", "peak memory")


def ranks_part(events: Sequence[EventBase]) -> str:
    measured = _since_last_start(events)
    if not measured:
        return ""
    ranks = range(len(measured[-1].tokens))
    tokens, seconds = ([_median(_known(measured, name, rank)) for rank in ranks] for name in ("tokens", "seconds"))
    memory = [max(_known(measured, "memory_bytes", rank), default=None) for rank in ranks]
    median = _median([own for own in seconds if own is not None])
    ratios = [own / median if own and median else None for own in seconds]
    rows = [
        (
            rank,
            figures.count(tokens[rank]),
            figures.duration(seconds[rank]),
            figures.UNKNOWN if ratio is None else f"{ratio:.2f} ×",
            figures.size(memory[rank]),
        )
        for rank, ratio in enumerate(ratios)
    ]
    notes = "".join(
        f"<p>{escape(f'Rank {rank} takes {ratio:.2g} times as long as the median rank; the others wait for it.')}</p>"
        for rank, ratio in enumerate(ratios)
        if ratio is not None and ratio >= SLOW
    )
    return f"<h2>Ranks</h2>{notes}{table(COLUMNS, rows, numbers=frozenset(range(len(COLUMNS))))}"


def _since_last_start(events: Sequence[EventBase]) -> list[TrainRanks]:
    found: list[TrainRanks] = []
    for event in events:
        if isinstance(event, TrainStarted):
            found = []
        elif isinstance(event, TrainRanks):
            found.append(event)
    return found


def _known(events: Sequence[TrainRanks], name: str, rank: int) -> list[float]:
    columns = [getattr(event, name) for event in events]
    return [values[rank] for values in columns if values is not None and values[rank] is not None]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
