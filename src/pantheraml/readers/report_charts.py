"""The report's charts: metrics over steps, downsampled, as data for the page's script.

Downsampling keeps the lowest and the highest point of each of `BUCKETS` buckets, so that spikes stay visible in runs of
any length. Non-finite values are gaps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pantheraml.base.events import EvalDone, TrainStep
from pantheraml.readers.summary import History

BUCKETS = 750

# Fewer points than this are drawn with markers: a line of one point is invisible.
MARKERS_BELOW = 60

# From this many points on, a smoothed line is drawn over the raw one.
SMOOTH_FROM = 40

GIB = 2**30

Point = tuple[float, float | None]


@dataclass(frozen=True)
class Series:
    """One line: its name in the legend, its role (which sets the color) and its points."""

    name: str
    role: str
    points: Sequence[Point]
    in_legend: bool = True


@dataclass(frozen=True)
class Chart:
    title: str
    series: tuple[Series, ...]
    note: str = ""
    from_zero: bool = False
    ticks: str = ""
    """Tick format of the axis, in d3 syntax; empty = plotly's choice."""
    x: str = "step"
    """What the horizontal axis counts."""
    top: float | None = None
    """Upper end of the axis; None: by the values."""

    def to_data(self) -> dict[str, Any]:
        series = [_series_data(series) for series in self.series]
        shape = {"from_zero": self.from_zero, "ticks": self.ticks, "x": self.x, "top": self.top}
        return {**shape, "series": series}


def charts(history: History) -> list[Chart]:
    """Return the charts for which the run has data."""
    steps, evals = list(history.steps.values()), list(history.evals.values())
    found = [
        _loss(_points(steps, "loss"), _points(evals, "loss")),
        _single("Perplexity on evaluation data", "eval", _points(evals, "perplexity")),
        _single("Learning rate", "other", _points(steps, "learning_rate"), from_zero=True, ticks="~e"),
        _single("Gradient norm", "other", _points(steps, "grad_norm"), from_zero=True),
        _single("Tokens per second", "other", _points(steps, "tokens_per_second"), from_zero=True),
        _single("Memory per device, GiB", "other", _points(steps, "memory_bytes", scale=1 / GIB), from_zero=True),
    ]
    return [chart for chart in found if chart is not None]


def _points(events: Sequence[TrainStep] | Sequence[EvalDone], name: str, *, scale: float = 1.0) -> list[Point]:
    """Points in order of steps; empty if no event has that metric."""
    values: list[Point] = [(event.step, getattr(event, name)) for event in events]
    if all(value is None for _, value in values):
        return []
    return [(step, v * scale if v is not None and math.isfinite(v) else None) for step, v in values]


def _single(title: str, role: str, points: list[Point], *, from_zero: bool = False, ticks: str = "") -> Chart | None:
    if not points:
        return None
    return Chart(title, (Series(title, role, points),), _note(points), from_zero=from_zero, ticks=ticks)


def _loss(train: list[Point], evaluation: list[Point]) -> Chart | None:
    series: list[Series] = []
    if len(train) >= SMOOTH_FROM:
        series = [Series("training, each step", "faint", train), Series("training, smoothed", "train", smooth(train))]
    elif train:
        series = [Series("training", "train", train)]
    if evaluation:
        series.append(Series("evaluation", "eval", evaluation))
    return Chart("Loss", tuple(series), _note(train or evaluation)) if series else None


def _note(points: Sequence[Point]) -> str:
    notes = []
    if len(points) > 2 * BUCKETS:
        notes.append(f"{len(points):,} points, drawn as the lowest and highest of {BUCKETS} buckets.")
    gaps = sum(value is None for _, value in points)
    if gaps:
        notes.append(f"{gaps:,} {'step' if gaps == 1 else 'steps'} without a finite value, not drawn.")
    return " ".join(notes)


def smooth(points: Sequence[Point]) -> list[Point]:
    """Centered moving average over about a fortieth of the run, which does not lag; gaps stay gaps.

    The window shrinks symmetrically toward the ends; otherwise a falling loss would seem to start lower.
    """
    half_window = max(2, len(points) // 80)
    sums = list(itertools.accumulate((value or 0.0 for _, value in points), initial=0.0))
    counts = list(itertools.accumulate((value is not None for _, value in points), initial=0))
    found: list[Point] = []
    for index, (step, value) in enumerate(points):
        half = min(half_window, index, len(points) - 1 - index)
        low, high = index - half, index + half + 1
        found.append((step, None if value is None else (sums[high] - sums[low]) / (counts[high] - counts[low])))
    return found


def downsample(points: Sequence[Point]) -> Sequence[Point]:
    """Downsample to two points per bucket, the lowest and the highest, in order; a bucket of gaps is one gap."""
    if len(points) <= 2 * BUCKETS:
        return points
    found: list[Point] = []
    for bucket in range(BUCKETS):
        part = points[bucket * len(points) // BUCKETS : (bucket + 1) * len(points) // BUCKETS]
        known = [(value, step) for step, value in part if value is not None]
        if not known:
            found.append((part[0][0], None))
            continue
        ends = {min(known), max(known)}
        found.extend(sorted((step, value) for value, step in ends))
    return found


def _series_data(series: Series) -> dict[str, Any]:
    points = downsample(series.points)
    return {
        "name": series.name,
        "role": series.role,
        "legend": series.in_legend,
        "markers": len(points) < MARKERS_BELOW,
        "x": [step for step, _ in points],
        "y": [None if value is None else float(f"{value:.6g}") for _, value in points],
    }
