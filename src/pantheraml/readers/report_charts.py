"""The report's charts: metrics over steps, downsampled, as data for the page's script.

Downsampling keeps the lowest and the highest point of each of `BUCKETS` buckets, so that spikes stay visible in runs of
any length. Non-finite values are gaps.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pantheraml.base.events import EvalDone, TrainStep, VerdictReached
from pantheraml.readers.summary import History

BUCKETS = 750

# Fewer points than this are drawn with markers: a line of one point is invisible.
MARKERS_BELOW = 60

# From this many points on, a smoothed line is drawn over the raw one.
SMOOTH_FROM = 40

SMOOTHING = {"light": 1 / 100, "medium": 1 / 40, "strong": 1 / 10}
"""Smoothing windows to choose from on the page, as fractions of the run."""

GIB = 2**30

Point = tuple[float, float | None]


@dataclass(frozen=True)
class ChartSeries:
    """One line: its name in the legend, its role (which sets the color) and its points."""

    name: str
    role: str
    points: Sequence[Point]
    in_legend: bool = True
    axes: Axes | None = None
    """Positions of its steps on the other axes; None: no other axes."""
    smoothness: str = ""
    """Shown when the reader of the page chooses it; empty: always."""
    labels: Mapping[int, str] | None = None
    """Hover texts of single marks, which are drawn without a line."""


class Axes:
    """Epoch, tokens and training time at each step, so that curves can be drawn over any of them."""

    def __init__(self, history: History) -> None:
        steps = list(history.steps.values())
        self._steps = [event.step for event in steps]
        self._columns: dict[str, list[float]] = {
            "epoch": [event.epoch for event in steps],
            "tokens": list(itertools.accumulate(event.tokens for event in steps)),
            "minutes": [round(at / 60, 4) for at in itertools.accumulate(event.seconds for event in steps)],
        }

    def columns(self, steps: Sequence[float]) -> dict[str, list[float | None]]:
        """A step that was not logged has the position of the last logged one before it."""
        places = [bisect_right(self._steps, step) - 1 for step in steps]
        return {
            name: [values[place] if place >= 0 else None for place in places] for name, values in self._columns.items()
        }


@dataclass(frozen=True)
class Chart:
    title: str
    series: tuple[ChartSeries, ...]
    note: str = ""
    from_zero: bool = False
    ticks: str = ""
    """Tick format of the axis, in d3 syntax; empty = plotly's choice."""
    x: str = "step"
    """Unit of the horizontal axis."""
    top: float | None = None
    """Upper end of the axis; None: by the values."""
    log: bool = False
    """Whether the page's switch makes its axis logarithmic."""

    def to_data(self) -> dict[str, Any]:
        series = [_series_data(series) for series in self.series]
        shape = {"from_zero": self.from_zero, "ticks": self.ticks, "x": self.x, "top": self.top, "log": self.log}
        return {**shape, "series": series}


def charts(
    history: History, *, verdicts: Sequence[VerdictReached] = (), predicted_memory: float | None = None
) -> list[Chart]:
    """Return the charts for which the run has data. `predicted_memory`: bytes per device, by the plan."""
    steps, evals, axes = list(history.steps.values()), list(history.evals.values()), Axes(history)
    found = [
        _loss(points(steps, "loss"), points(evals, "loss"), axes),
        _single("Perplexity on evaluation data", "eval", points(evals, "perplexity"), axes),
        _single("Learning rate", "other", points(steps, "learning_rate"), axes, from_zero=True, ticks="~e"),
        _gradient_norm(points(steps, "grad_norm"), verdicts, axes),
        _single("Tokens per second", "other", points(steps, "tokens_per_second"), axes, from_zero=True),
        _memory(points(steps, "memory_bytes", scale=1 / GIB), predicted_memory, axes),
    ]
    return [chart for chart in found if chart is not None]


def points(events: Sequence[TrainStep] | Sequence[EvalDone], name: str, *, scale: float = 1.0) -> list[Point]:
    """Points in order of steps; empty if no event has that metric."""
    values: list[Point] = [(event.step, getattr(event, name)) for event in events]
    if all(value is None for _, value in values):
        return []
    return [(step, v * scale if v is not None and math.isfinite(v) else None) for step, v in values]


def _single(
    title: str, role: str, points: list[Point], axes: Axes, *, from_zero: bool = False, ticks: str = ""
) -> Chart | None:
    if not points:
        return None
    return Chart(title, (ChartSeries(title, role, points, axes=axes),), _note(points), from_zero=from_zero, ticks=ticks)


def _loss(train: list[Point], evaluation: list[Point], axes: Axes) -> Chart | None:
    series: list[ChartSeries] = []
    if len(train) >= SMOOTH_FROM:
        series = [ChartSeries("training, each step", "faint", train, axes=axes)]
        series += [
            ChartSeries("training, smoothed", "train", smooth(train, share=share), axes=axes, smoothness=name)
            for name, share in SMOOTHING.items()
        ]
    elif train:
        series = [ChartSeries("training", "train", train, axes=axes)]
    if evaluation:
        series.append(ChartSeries("evaluation", "eval", evaluation, axes=axes))
    return Chart("Loss", tuple(series), _note(train or evaluation), log=True) if series else None


def _gradient_norm(norms: list[Point], verdicts: Sequence[VerdictReached], axes: Axes) -> Chart | None:
    """Steps that the guard did not take as usual are marked; where the norm is not finite, at the top."""
    if not norms:
        return None
    known = {step: value for step, value in norms if value is not None}
    top = max(known.values(), default=1.0)
    marks = {verdict.step: f"{verdict.action}: {verdict.cause}" for verdict in verdicts}
    series = [ChartSeries("gradient norm", "other", norms, axes=axes)]
    if marks:
        placed: list[Point] = [(step, known.get(step, top)) for step in sorted(marks)]
        series.append(ChartSeries("verdict of the guard", "bad", placed, axes=axes, labels=marks))
    return Chart("Gradient norm", tuple(series), _note(norms), from_zero=True, log=True)


def _memory(measured: list[Point], predicted: float | None, axes: Axes) -> Chart | None:
    if not measured:
        return None
    series = [ChartSeries("measured", "other", measured, axes=axes)]
    if predicted is not None:
        level = predicted / GIB
        series.append(ChartSeries("predicted", "eval", [(step, level) for step, _ in measured], axes=axes))
    return Chart("Memory per device, GiB", tuple(series), _note(measured), from_zero=True)


def _note(points: Sequence[Point]) -> str:
    notes = []
    if len(points) > 2 * BUCKETS:
        notes.append(f"{len(points):,} points, drawn as the lowest and highest of {BUCKETS} buckets.")
    gaps = sum(value is None for _, value in points)
    if gaps:
        notes.append(f"{gaps:,} {'step' if gaps == 1 else 'steps'} without a finite value, not drawn.")
    return " ".join(notes)


def smooth(points: Sequence[Point], *, share: float = 1 / 40) -> list[Point]:
    """Centered moving average over that share of the run, which does not lag; gaps stay gaps.

    The window shrinks symmetrically toward the ends; otherwise a falling loss would seem to start lower.
    """
    half_window = max(2, int(len(points) * share / 2))
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


def _series_data(series: ChartSeries) -> dict[str, Any]:
    points = downsample(series.points)
    steps = [step for step, _ in points]
    labels = None if series.labels is None else [series.labels.get(int(step), "") for step in steps]
    return {
        "name": series.name,
        "role": series.role,
        "legend": series.in_legend,
        "markers": len(points) < MARKERS_BELOW,
        "smoothness": series.smoothness,
        "labels": labels,
        "x": steps,
        "axes": {} if series.axes is None else series.axes.columns(steps),
        "y": [None if value is None else float(f"{value:.6g}") for _, value in points],
    }
