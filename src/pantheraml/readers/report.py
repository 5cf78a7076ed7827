"""`report.html`: a self-contained page about a run, generated from its events; it works offline.

plotly.js comes from the installed plotly wheel and is embedded once. The page follows the browser's light or dark
theme.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pantheraml.base.errors import ConfigError
from pantheraml.base.event_stream import describe_damage
from pantheraml.base.events import (
    CheckpointSaved,
    ChoiceMade,
    ErrorRaised,
    EventBase,
    GPUHealthChanged,
    IncidentRecorded,
    Notice,
    PlanMade,
    RunFallback,
    RunRestarted,
    VerdictReached,
    WarningIssued,
)
from pantheraml.base.folders import write_text
from pantheraml.readers import number_format as figures
from pantheraml.readers.recorded_run import RecordedRun, read_run
from pantheraml.readers.report_charts import SMOOTH_FROM, SMOOTHING, Chart, charts
from pantheraml.readers.report_hardware import hardware_charts, hardware_part
from pantheraml.readers.report_incidents import incidents_part
from pantheraml.readers.report_page import (
    OPENING,
    chart_cards,
    chart_controls,
    escape,
    figure_cards,
    folded,
    page,
    table,
)
from pantheraml.readers.report_ranks import ranks_part
from pantheraml.readers.summary import History

FILE_NAME = "report.html"

# Limits the size of the page for a run that warns at every step.
MAX_MESSAGES = 200

_PILLS = {"succeeded": "good", "failed": "bad", "crashed": "bad", "stopped": "warn", "preempted": "warn"}


@dataclass(frozen=True)
class Section:
    """An additional section of the report: text, a table, or both, all in plain text."""

    title: str
    text: str = ""
    columns: tuple[str, ...] = ()
    rows: Sequence[Sequence[Any]] = ()


def write_report(
    run_dir: Path,
    output: Path | None = None,
    *,
    extra: Sequence[Section] = (),
    extra_figures: Sequence[tuple[str, str]] = (),
) -> Path:
    """Write the report to `output` (None: `run_dir/report.html`), during the run or after it.

    `extra_figures` (name, value) come before the key figures, `extra` after the charts.
    """
    run = read_run(run_dir)
    events, summary, past = run.events, run.summary, run.past
    verdicts = [event for event in events if isinstance(event, VerdictReached)]
    drawn = charts(past, verdicts=verdicts, predicted_memory=predicted_memory(events))
    hardware, title = hardware_charts(events), run.name
    smoothing = tuple(SMOOTHING) if len(past.steps) >= SMOOTH_FROM else ()
    parts = [
        _header(title, summary),
        _alert(summary),
        figure_cards([*extra_figures, *_key_figures(summary, past)]),
        _charts(drawn, smoothing),
        *(_section(section) for section in extra),
        _plan(events),
        ranks_part(events),
        hardware_part(events, hardware, first_chart=len(drawn)),
        _data(summary),
        incidents_part(run_dir, events),
        _messages(events, run.damaged_lines),
        _checkpoints(events, kept=set(summary["checkpoints"])),
        _config(run),
        _footer(summary),
    ]
    return write_page(output or run_dir / FILE_NAME, title, "".join(parts), [*drawn, *hardware])


def write_page(path: Path, title: str, body: str, drawn: Sequence[Chart]) -> Path:
    """Write a page with charts; a file that is no such page is not replaced."""
    from plotly.offline import get_plotlyjs  # takes 0.2 s, so only when a page is written

    _require_page(path)
    data = json.dumps([chart.to_data() for chart in drawn], separators=(",", ":")).replace("<", "\\u003c")
    write_text(path, page(f"{title} · PantheraML", body, data, get_plotlyjs()))
    return path


def _require_page(path: Path) -> None:
    if path.is_dir():
        raise ConfigError(f"{path} is a folder.", fix="Name the file to write.")
    if not path.parent.is_dir():
        raise ConfigError(f"There is no folder {path.parent}.", fix="Create it, or choose another file.")
    if not path.exists():
        return
    with open(path, "rb") as file:
        ours = file.read(len(OPENING)) in (OPENING, b"")
    if not ours:
        raise ConfigError(f"{path} exists and is not a report.", fix="Choose another file, or remove it.")


def _charts(drawn: Sequence[Chart], smoothing: Sequence[str]) -> str:
    if not drawn:
        return ""
    cards = chart_cards([(chart.title, chart.note) for chart in drawn])
    return f"<h2>Charts</h2>{chart_controls(smoothing=smoothing, chosen='medium')}{cards}"


def predicted_memory(events: Sequence[EventBase]) -> float | None:
    """Bytes per device by the newest plan; None if it does not know."""
    plans = [event.plan for event in events if isinstance(event, PlanMade)]
    value = plans[-1].get("predicted_memory_bytes") if plans else None
    return value if isinstance(value, int | float) else None


def _config(run: RecordedRun) -> str:
    """Settings as written; of paths, only the last part, since reports are handed around."""
    if not run.config:
        return ""
    lines = (f"{key}: {_without_folders(value)}" for key, value in run.config.items())
    return f"<h2>Configuration</h2>{folded(f'{len(run.config)} settings', chr(10).join(lines))}"


def _without_folders(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_folders(each) for each in value]
    return f".../{Path(value).name}" if isinstance(value, str) and Path(value).is_absolute() else value


def _header(title: str, summary: dict[str, Any]) -> str:
    status = summary["status"] or "unknown"
    pill = f'<span class="pill {_PILLS.get(status, "")}">{escape(status)}</span>'
    facts = []
    if summary["world_size"] is not None:
        processes = "1 process" if summary["world_size"] == 1 else f"{summary['world_size']} processes"
        facts.append(f"{processes} on {summary['device']}")
    if summary["precision"]:
        facts.append(str(summary["precision"]))
    if summary["parameters"] is not None:
        trained = figures.count(summary["trainable_parameters"])
        facts.append(f"{figures.count(summary['parameters'])} parameters, {trained} trainable")
    if summary["started"]:
        facts.append(f"started {_when(summary['started'])}")
    return f'<header><h1>{escape(title)}</h1>{pill}<p class="soft">{escape(" · ".join(facts))}</p></header>'


def _when(iso: str) -> str:
    return datetime.fromisoformat(iso).strftime("%Y-%m-%d %H:%M UTC")


def _alert(summary: dict[str, Any]) -> str:
    error = summary["error"]
    if error is None:
        concern = summary["concern"]
        return f'<div class="alert" role="alert">{escape(concern)}</div>' if concern else ""
    lines = [error["what"], *(f"{label}: {error[key]}" for label, key in _ERROR_LINES if error[key])]
    return f'<div class="alert" role="alert"><b>{escape(error["class"])}</b>\n{escape(chr(10).join(lines))}</div>'


_ERROR_LINES = (("where", "where"), ("fix", "fix"))


def _key_figures(summary: dict[str, Any], past: History) -> Iterable[tuple[str, str]]:
    if past.steps:
        yield "training loss, last step", figures.loss(summary["final_loss"])
    if past.evals:
        yield "evaluation loss, last", figures.loss(summary["final_eval_loss"])
        yield "evaluation loss, best", figures.loss(summary["best_eval_loss"])
        yield "perplexity", figures.small(summary["final_perplexity"])
    if summary["steps"] is not None:
        total = summary["total_steps"]
        of = f" of {figures.count(total)}" if total and total != summary["steps"] else ""
        yield "steps", f"{figures.count(summary['steps'])}{of}"
    if summary["tokens"] is not None:
        yield "tokens", figures.count(summary["tokens"])
    if summary["tokens_per_second"] is not None:
        yield "tokens per second, median", figures.count(summary["tokens_per_second"])
    if summary["peak_memory_bytes"] is not None:
        yield (
            "peak memory per device",
            _beside_prediction(figures.size, summary["peak_memory_bytes"], summary["predicted_memory_bytes"]),
        )
    if summary["step_seconds"] is not None and summary["predicted_step_seconds"] is not None:
        yield (
            "time of a step, median",
            _beside_prediction(figures.duration, summary["step_seconds"], summary["predicted_step_seconds"]),
        )
    if summary["seconds"] is not None:
        yield "training time", figures.duration(summary["seconds"])
    if summary["skipped_steps"]:
        yield "skipped steps", figures.count(summary["skipped_steps"])


def _beside_prediction(text: Callable[[float | None], str], measured: float, predicted: float | None) -> str:
    """A figure, and what the plan said of it: `36.9 GiB (predicted 36.5 GiB, -1.1 %)`."""
    if not predicted:
        return text(measured)
    return f"{text(measured)} (predicted {text(predicted)}, {(predicted / measured - 1) * 100:+.1f} %)"


def _section(section: Section) -> str:
    text = "".join(f"<p>{escape(line)}</p>" for line in section.text.splitlines())
    rows = table(section.columns, section.rows) if section.columns else ""
    return f"<h2>{escape(section.title)}</h2>{text}{rows}"


def _plan(events: Sequence[EventBase]) -> str:
    """Choices of the last plan, and those made when the model was loaded."""
    choices: dict[str, tuple[Any, bool, str]] = {}
    for event in events:
        if isinstance(event, PlanMade):
            made = event.plan["choices"]
            choices = {choice["name"]: (choice["value"], choice["automatic"], choice["reason"]) for choice in made}
        elif isinstance(event, ChoiceMade):
            choices[event.name] = (event.value, event.automatic, event.reason)
    if not choices:
        return ""
    rows = [
        (name, value, "automatic" if automatic else "set", reason)
        for name, (value, automatic, reason) in choices.items()
    ]
    return f"<h2>Plan</h2>{table(('setting', 'value', 'chosen', 'reason'), rows)}"


def _data(summary: dict[str, Any]) -> str:
    if not summary["data"]:
        return ""
    columns = (
        "split",
        "format",
        "rows",
        "skipped",
        "truncated",
        "tokens",
        "target tokens",
        "sequences",
        "packed",
        "time",
    )
    rows = [
        (
            split,
            data["format"],
            figures.count(data["rows"]),
            figures.count(data["skipped_rows"]),
            figures.count(data["truncated_rows"]),
            figures.count(data["tokens"]),
            figures.count(data["target_tokens"]),
            f"{figures.count(data['sequences'])} × {figures.count(data['seq_len'])}",
            figures.share(data["efficiency"]),
            "cached" if data["cached"] else figures.duration(data["seconds"]),
        )
        for split, data in summary["data"].items()
    ]
    return f"<h2>Data</h2>{table(columns, rows, numbers=frozenset(range(2, len(columns))))}"


def _messages(events: Sequence[EventBase], damaged_lines: int) -> str:
    """Notices, warnings, verdicts and errors, in order."""
    rows = [row for event in events if (row := _message(event)) is not None]
    note = f'<p class="soft">The last {MAX_MESSAGES} of {len(rows):,}.</p>' if len(rows) > MAX_MESSAGES else ""
    if damaged_lines:
        note += f'<p class="soft">{escape(describe_damage(damaged_lines))}</p>'
    shown = table(("time, UTC", "kind", "message"), rows[-MAX_MESSAGES:]) if rows else ""
    return f"<h2>Messages</h2>{note}{shown}" if note or shown else ""


def _message(event: EventBase) -> tuple[str, str, str] | None:
    at = datetime.fromtimestamp(event.time, UTC).strftime("%H:%M:%S")
    if isinstance(event, Notice | WarningIssued | RunRestarted | RunFallback | GPUHealthChanged):
        return at, event.kind, event.message
    if isinstance(event, VerdictReached):
        return at, event.kind, f"step {event.step}: {event.action}: {event.cause}"
    if isinstance(event, IncidentRecorded):
        return at, event.kind, f"step {event.step}: {event.finding}; see {event.path}"
    if isinstance(event, ErrorRaised):
        where = f" (rank {event.rank})" if event.rank else ""
        return at, event.kind, f"{event.error}{where}: {event.what}"
    return None


def _checkpoints(events: Sequence[EventBase], *, kept: set[int]) -> str:
    saved = {event.step: event for event in events if isinstance(event, CheckpointSaved)}
    if not saved:
        return ""
    rows = [
        (
            figures.count(step),
            figures.size(event.bytes),
            figures.duration(event.seconds),
            " ".join(word for word, holds in (("kept", step in kept), ("best", event.best)) if holds) or "removed",
            event.path,
        )
        for step, event in sorted(saved.items())
    ]
    columns = ("step", "size", "time to write", "state", "path")
    return f"<h2>Checkpoints</h2>{table(columns, rows[-MAX_MESSAGES:], numbers=frozenset({0, 1, 2}))}"


def _footer(summary: dict[str, Any]) -> str:
    parts = [f"PantheraML {summary['pantheraml'] or 'of unknown version'}"]
    if summary["command"]:
        parts.append(f"command: {summary['command']}")
    if summary["starts"] > 1:
        parts.append(f"started {summary['starts']} times; repeated steps are shown once")
    if summary["finished"]:
        parts.append(f"finished {_when(summary['finished'])}")
    if summary["output"]:
        parts.append(f"{summary['output']['form']}: {summary['output']['path']}")
    method = (
        "Tokens per second: median over steps, without the first three of each start. "
        "Training time: wall time including evaluations and checkpoints."
    )
    return f"<footer><p>{escape(' · '.join(parts))}</p><p>{escape(method)}</p></footer>"
