"""The page of a comparison: overlaid curves, figures, and differences in configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pantheraml.readers import number_format as figures
from pantheraml.readers.compare import Comparison, Row
from pantheraml.readers.recorded_run import RecordedRun
from pantheraml.readers.report import write_page
from pantheraml.readers.report_charts import (
    GIB,
    SMOOTH_FROM,
    SMOOTHING,
    Axes,
    Chart,
    ChartSeries,
    Point,
    points,
    smooth,
)
from pantheraml.readers.report_page import chart_cards, chart_controls, escape, table

COLORS = 8
"""Number of run colors in the style sheet; later runs reuse them."""

_CURVES = (
    ("Training loss", "steps", "loss", 1.0, False),
    ("Evaluation loss", "evals", "loss", 1.0, False),
    ("Learning rate", "steps", "learning_rate", 1.0, True),
    ("Gradient norm", "steps", "grad_norm", 1.0, True),
    ("Tokens per second", "steps", "tokens_per_second", 1.0, True),
    ("Memory per device, GiB", "steps", "memory_bytes", 1 / GIB, True),
)


def write_comparison(found: Comparison, output: Path) -> Path:
    drawn = [chart for curve in _CURVES if (chart := _chart(found, *curve)) is not None]
    cards = chart_cards([(chart.title, chart.note) for chart in drawn])
    smoothed = any(len(run.past.steps) >= SMOOTH_FROM for run in found.runs)
    controls = chart_controls(smoothing=tuple(SMOOTHING) if smoothed else (), chosen="medium")
    notes = "".join(f'<div class="alert warn">{escape(note)}</div>' for note in found.notes)
    body = (
        f'<header><h1>{escape(figures.count(len(found.names)))} runs</h1><p class="soft">'
        f"{escape(' · '.join(found.names))}</p></header>{notes}"
        f"<h2>Curves</h2>{controls}{cards}<h2>Figures</h2>{_table(found.names, found.rows)}"
        f"<h2>Differences of the configuration</h2>{_differences(found)}"
    )
    return write_page(output, f"{len(found.names)} runs", body, drawn)


def _table(names: Sequence[str], rows: Sequence[Row]) -> str:
    columns = ("", *names)
    best = {(line, row.best + 1) for line, row in enumerate(rows) if row.best is not None}
    cells = [(row.title, *row.cells) for row in rows]
    return table(columns, cells, numbers=frozenset(range(1, len(columns))), best=best)


def _differences(found: Comparison) -> str:
    return _table(found.names, found.differences) if found.differences else "<p>The configurations do not differ.</p>"


def _chart(found: Comparison, title: str, kind: str, field: str, scale: float, from_zero: bool) -> Chart | None:
    series: list[ChartSeries] = []
    for number, (name, run) in enumerate(zip(found.names, found.runs, strict=True)):
        line = _line(run, kind, field, scale)
        if line:
            series += _series(name, f"run{number % COLORS}", line, Axes(run.past), smoothed=title == "Training loss")
    if not series:
        return None
    log = title in ("Training loss", "Evaluation loss", "Gradient norm")
    return Chart(title, tuple(series), from_zero=from_zero, log=log)


def _line(run: RecordedRun, kind: str, field: str, scale: float) -> list[Point]:
    events = run.past.steps if kind == "steps" else run.past.evals
    return points(list(events.values()), field, scale=scale)  # type: ignore[arg-type]


def _series(name: str, role: str, line: list[Point], axes: Axes, *, smoothed: bool) -> list[ChartSeries]:
    """A long training loss is drawn smoothed, by the page's choice; raw lines over each other hide one another."""
    if not smoothed or len(line) < SMOOTH_FROM:
        return [ChartSeries(name, role, line, axes=axes)]
    levels = [
        ChartSeries(name, role, smooth(line, share=share), axes=axes, smoothness=level)
        for level, share in SMOOTHING.items()
    ]
    return [ChartSeries(name, role, line, axes=axes, smoothness="none"), *levels]
