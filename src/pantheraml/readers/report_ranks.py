"""The report's table of ranks: who was slow, who was full. From `train.ranks`, since processes were last started."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pantheraml.base.events import Event, number
from pantheraml.readers import figures
from pantheraml.readers.report_page import escape, table

SLOW = 1.2
"""A rank that takes so many times as long as the middle one is named above the table."""

COLUMNS = ("rank", "tokens in a step", "time of a step without waiting", "against the middle rank", "peak memory")


def ranks_part(events: Sequence[Event]) -> str:
    told = _since_last_start(events)
    if not told:
        return ""
    ranks = range(len(told[-1]["tokens"]))
    tokens, seconds = ([_median(_known(told, name, rank)) for rank in ranks] for name in ("tokens", "seconds"))
    memory = [max(_known(told, "memory_bytes", rank), default=None) for rank in ranks]
    middle = _median([of for of in seconds if of is not None])
    ratios = [of / middle if of and middle else None for of in seconds]
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
    said = "".join(
        f"<p>{escape(f'Rank {rank} takes {ratio:.2g} times as long as the middle one; the others wait for it.')}</p>"
        for rank, ratio in enumerate(ratios)
        if ratio is not None and ratio >= SLOW
    )
    return f"<h2>Ranks</h2>{said}{table(COLUMNS, rows, numbers=frozenset(range(len(COLUMNS))))}"


def _since_last_start(events: Sequence[Event]) -> list[Event]:
    found: list[Event] = []
    for event in events:
        if event["kind"] == "train.started":
            found = []
        elif event["kind"] == "train.ranks":
            found.append(event)
    return found


def _known(told: Sequence[Event], name: str, rank: int) -> list[float]:
    values = [number(event[name][rank]) for event in told if event[name] is not None]
    return [value for value in values if value is not None]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
