"""Compare runs: figures side by side, differences in configuration, and why figures are not comparable."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pantheraml.base.errors import RunDirectoryError
from pantheraml.readers import number_format as figures
from pantheraml.readers.recorded_run import RecordedRun, read_run

ABSENT = "–"


@dataclass(frozen=True)
class Figure:
    """A row of the comparison."""

    title: str
    read: Callable[[dict[str, Any]], Any]
    show: Callable[[Any], str]
    best: Callable[[Sequence[float]], float] | None = None
    """min or max, whichever is better; None where neither is."""


def _field(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda summary: summary[name]


def _text(value: Any) -> str:
    return figures.UNKNOWN if value is None else str(value)


def _where(summary: dict[str, Any]) -> str | None:
    if summary["world_size"] is None:
        return None
    return f"{summary['world_size']} × {summary['device'] or 'unknown device'}"


def _energy(joules: float | None) -> str:
    return figures.UNKNOWN if joules is None else f"{joules / 3.6e6:,.3g} kWh"


def _percent(value: float | None) -> str:
    return figures.UNKNOWN if value is None else f"{value:.1f} %"


FIGURES = (
    Figure("status", _field("status"), _text),
    Figure("training loss, last step", _field("final_loss"), figures.loss),
    Figure("evaluation loss, best", _field("best_eval_loss"), figures.loss, min),
    Figure("evaluation loss, last", _field("final_eval_loss"), figures.loss, min),
    Figure("perplexity, last", _field("final_perplexity"), figures.small, min),
    Figure("steps", _field("steps"), figures.count),
    Figure("tokens", _field("tokens"), figures.count),
    Figure("tokens per second, median", _field("tokens_per_second"), figures.count, max),
    Figure("training time", _field("seconds"), figures.duration, min),
    Figure("peak memory per device", _field("peak_memory_bytes"), figures.size, min),
    Figure("GPU utilization", _field("gpu_utilization_percent"), _percent),
    Figure("energy", _field("energy_joules"), _energy, min),
    Figure("processes", _where, _text),
    Figure("precision", _field("precision"), _text),
    Figure("trainable parameters", _field("trainable_parameters"), figures.count),
    Figure("skipped steps", _field("skipped_steps"), figures.count),
    Figure("starts", _field("starts"), figures.count),
    Figure("version", _field("pantheraml"), _text),
)


@dataclass(frozen=True)
class Row:
    title: str
    cells: tuple[str, ...]
    best: int | None = None
    """Position of the best run; None where no run is, or none can be."""


@dataclass(frozen=True)
class Comparison:
    names: tuple[str, ...]
    runs: tuple[RecordedRun, ...]
    rows: tuple[Row, ...]
    differences: tuple[Row, ...]
    """Configuration keys that differ; absent keys are a dash."""
    notes: tuple[str, ...]
    """Why figures are not comparable, and what could not be read."""

    def to_json(self) -> dict[str, Any]:
        runs = [
            {"name": name, "path": str(run.path), "run": run.summary}
            for name, run in zip(self.names, self.runs, strict=True)
        ]
        configs = [run.config or {} for run in self.runs]
        keys = [row.title for row in self.differences]
        differences = {key: [config.get(key) for config in configs] for key in keys}
        return {"runs": runs, "config_differences": differences, "notes": list(self.notes)}


def compare(paths: Sequence[Path]) -> Comparison:
    resolved = [path.resolve() for path in paths]
    twice = next((path for path in paths if resolved.count(path.resolve()) > 1), None)
    if twice is not None:
        raise RunDirectoryError(f"{twice} is named twice.", fix="Name each run once.")
    runs = tuple(read_run(path) for path in paths)
    names = distinct_names(resolved)
    rows = tuple(row for figure in FIGURES if (row := _row(figure, runs)) is not None)
    return Comparison(names, runs, rows, differences(runs), tuple(_notes(names, runs)))


def distinct_names(paths: Sequence[Path]) -> tuple[str, ...]:
    """Return the last part of each path, with as many parents as are needed to tell them apart."""
    depth, longest = 1, max(len(path.parts) for path in paths)
    while depth < longest and len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return tuple("/".join(path.parts[-depth:]) for path in paths)


def _row(figure: Figure, runs: Sequence[RecordedRun]) -> Row | None:
    values = [figure.read(run.summary) for run in runs]
    if all(value is None for value in values):
        return None
    return Row(figure.title, tuple(figure.show(value) for value in values), _best(figure, values))


def _best(figure: Figure, values: Sequence[Any]) -> int | None:
    if figure.best is None or any(value is None for value in values):
        return None
    known = [value for value in values if math.isfinite(value)]
    if len(set(values)) < 2 or not known:
        return None
    return values.index(figure.best(known))


def differences(runs: Sequence[RecordedRun]) -> tuple[Row, ...]:
    """Keys that are not the same in all runs that have a configuration."""
    known = [run.config for run in runs if run.config is not None]
    keys = dict.fromkeys(key for config in known for key in config)
    rows = []
    for key in keys:
        if len({repr(config.get(key)) for config in known}) > 1:
            rows.append(Row(key, tuple(_value(run, key) for run in runs)))
    return tuple(rows)


def _value(run: RecordedRun, key: str) -> str:
    return str(run.config[key]) if run.config is not None and key in run.config else ABSENT


def _notes(names: Sequence[str], runs: Sequence[RecordedRun]) -> list[str]:
    notes = [f"{name} has no readable config.yaml." for name, run in zip(names, runs, strict=True) if not run.config]
    for split, what in (("train", "trained"), ("eval", "evaluated")):
        prints = {data[split]["fingerprint"] for run in runs if split in (data := run.summary["data"])}
        if len(prints) > 1:
            notes.append(f"The runs were {what} on different data: their losses are not of the same text.")
    unfinished = [name for name, run in zip(names, runs, strict=True) if run.summary["status"] == "running"]
    if unfinished:
        notes.append(f"Not finished: {', '.join(unfinished)}.")
    return notes
