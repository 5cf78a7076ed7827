"""The figures of a job over its steps, for charts: each thinned, with the epoch, tokens and seconds at its points.

Made in one pass over the events. A step that was repeated after a restart counts once, with the later figures. The
smoothed losses are exponential moving averages over all points, made before thinning, so that thinning does not bias
them; a client that continues from `cursor` applies the same rule to their last values.
"""

from __future__ import annotations

import itertools
import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pantheraml.service.jobs.thin import Point, thinned

METRICS = ("train_loss", "learning_rate", "grad_norm", "tokens_per_second", "memory_bytes")
EVAL_METRICS = ("valid_loss", "perplexity")
KINDS = ("train.started", "train.step", "eval.done", "verdict")
MOST_VERDICTS = 500
_CACHED = 32
SMOOTHING_STEPS = (10, 50, 250)

Row = tuple[int, str, int, str]
"""Event id, kind, step, and its data as JSON."""


@dataclass
class _Step:
    values: dict[str, Any]
    evaluated: dict[str, Any] = field(default_factory=dict)


def curves(rows: Iterable[Row], points: int) -> dict[str, Any]:
    """`rows`: the events of KINDS in order."""
    steps: dict[int, _Step] = {}
    verdicts: dict[int, dict[str, Any]] = {}
    cursor, total_steps = 0, None
    for event, kind, step, data in rows:
        cursor = event
        values = json.loads(data)
        if kind == "train.started":
            total_steps = values.get("total_steps")
        elif kind == "verdict":
            verdicts[step] = values
        elif kind == "eval.done":
            steps.setdefault(step, _Step({})).evaluated = values
        else:
            steps[step] = _Step(values)
    order = sorted(steps)
    logged = [steps[step].values for step in order]
    epochs = list(_last_known(values.get("epoch") for values in logged))
    tokens = list(itertools.accumulate(values.get("tokens") or 0 for values in logged))
    seconds = list(itertools.accumulate(values.get("seconds") or 0.0 for values in logged))
    place = {step: index for index, step in enumerate(order)}

    def line(found: Sequence[Point], most: int = points) -> dict[str, Any]:
        kept = thinned(found, most)
        at = [place[step] for step, _ in kept]
        return {
            "steps": [step for step, _ in kept],
            "values": [_short(value) for _, value in kept],
            "epochs": [_short(epochs[i]) for i in at],
            "tokens": [tokens[i] for i in at],
            "seconds": [_short(seconds[i]) for i in at],
            "total": len(found),
        }

    metrics = {name: line(_known(order, logged, name)) for name in METRICS}
    evaluated = [steps[step].evaluated for step in order]
    metrics |= {name: line(_known(order, evaluated, name)) for name in EVAL_METRICS}
    losses = _known(order, logged, "train_loss")
    smoothed = {str(span): line(_smoothed(losses, span)) for span in SMOOTHING_STEPS}
    return {
        "metrics": {name: found for name, found in metrics.items() if found["total"]},
        "smoothed": smoothed if losses else {},
        "verdicts": list(verdicts.values())[-MOST_VERDICTS:],
        "total_steps": total_steps,
        "step": order[-1] if order else None,
        "epoch": epochs[-1] if epochs else None,
        "tokens": tokens[-1] if tokens else 0,
        "seconds": _short(seconds[-1]) if seconds else 0.0,
        "cursor": cursor,
    }


class CurveCache:
    """Recent answers, as JSON: rereading the events of a long run takes seconds, and a finished one has no new ones."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, int], tuple[int, bytes]] = OrderedDict()

    def get(self, job_id: str, points: int, newest: int) -> bytes | None:
        """`newest`: id of the job's last event of KINDS."""
        at, content = self._known.get((job_id, points), (-1, b""))
        return content if at == newest else None

    def make(self, job_id: str, points: int, newest: int, rows: Sequence[Row]) -> bytes:
        content = json.dumps(curves(rows, points), allow_nan=False, separators=(",", ":")).encode()
        self._known[job_id, points] = (newest, content)
        while len(self._known) > _CACHED:
            self._known.popitem(last=False)
        return content


def _known(order: Sequence[int], rows: Sequence[dict[str, Any]], name: str) -> list[Point]:
    pairs = zip(order, (row.get(name) for row in rows), strict=True)
    return [(step, value) for step, value in pairs if isinstance(value, int | float)]


def _last_known(values: Iterable[float | None]) -> Iterable[float | None]:
    last = None
    for value in values:
        last = last if value is None else value
        yield last


def _smoothed(points: Sequence[Point], span: int) -> list[Point]:
    weight, mean = 2 / (span + 1), 0.0
    found: list[Point] = []
    for count, (step, value) in enumerate(points):
        mean = value if count == 0 else mean + max(weight, 1 / (count + 1)) * (value - mean)
        found.append((step, mean))
    return found


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.7g}")
