"""The progress display: a live bar on a terminal, plain lines in a log file.

`ProgressBar` turns events into stages in progress (tokenizing, training, evaluating, ...) and permanent lines.
`_LiveDisplay` draws the stages in place, below the lines; `_LineDisplay` prints a line every few seconds. Both write to
stderr by default; stdout is for results. Errors are not shown here: the command line prints them once, at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table
from rich.text import Text

from pantheraml.base.events import (
    CheckpointSaved,
    DataProgress,
    DataReady,
    EvalDone,
    EvalProgress,
    EventBase,
    GenerateDone,
    GenerateProgress,
    GPUHealthChanged,
    IncidentRecorded,
    ModelReady,
    ModelSaved,
    Notice,
    PlanMade,
    QuantizeProgress,
    RanksLeftOut,
    RunFallback,
    RunRestarted,
    RunStarted,
    TrainFinished,
    TrainStarted,
    TrainStep,
    VerdictReached,
    VerifyProgress,
    WarningIssued,
)
from pantheraml.base.text import printable
from pantheraml.readers import number_format as figures
from pantheraml.readers.summary import median_speed, speeds_of_starts

# One line every 5 s at first, later every 2 % of a stage's age: about 100 lines in an hour, 200 in ten.
LINE_SECONDS = 5.0
LINE_SHARE = 0.02


@dataclass
class Stage:
    """Work in progress; times are those of the events (`moment`)."""

    label: str
    unit: str
    started: float
    begun_at: float = 0
    """Value of `done` at the start; a resumed run does not start at zero."""
    done: float = 0
    total: float | None = None
    now: float = 0.0
    figures: str = ""

    def remaining_seconds(self) -> float | None:
        """Estimate from the pace so far; None without progress or a known total."""
        gained = self.done - self.begun_at
        if self.total is None or gained <= 0 or self.done >= self.total:
            return None
        return (self.total - self.done) * (self.now - self.started) / gained

    def position(self) -> str:
        if self.unit == "bytes":
            return figures.size(self.done) + ("" if self.total is None else f" of {figures.size(self.total)}")
        end = "" if self.total is None else f"/{figures.count(self.total)}"
        return f"{figures.count(self.done)}{end} {self.unit}"


class _Display(Protocol):
    def show(self, stages: Iterable[Stage], changed: Stage) -> None: ...

    def line(self, text: str, style: str) -> None: ...

    def close(self) -> None: ...


class ProgressBar:
    """Shows a run's progress on `console` (default: stderr); one that is not a terminal gets plain lines."""

    def __init__(self, title: str = "", *, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self._stages: dict[str, Stage] = {}
        self._eval_loss: float | None = None
        self._last_step: TrainStep | None = None
        self._speeds: dict[int, float] = {}
        """Tokens per second by step of this start; `_earlier` has those of earlier starts."""
        self._earlier: list[list[float]] = []
        self._output = Path()
        self._display: _Display = _LiveDisplay(console) if console.is_terminal else _LineDisplay(console)
        self._handlers: dict[type[EventBase], Callable[[Any], None]] = {
            RunStarted: self._run_started,
            PlanMade: self._plan,
            DataProgress: self._data_progress,
            DataReady: self._data_ready,
            ModelReady: self._model_ready,
            TrainStarted: self._train_started,
            TrainStep: self._train_step,
            TrainFinished: self._train_finished,
            EvalProgress: self._eval_progress,
            EvalDone: self._eval_done,
            CheckpointSaved: self._checkpoint_saved,
            ModelSaved: self._model_saved,
            GenerateProgress: self._generate_progress,
            GenerateDone: self._generate_done,
            VerifyProgress: self._verify_progress,
            QuantizeProgress: self._quantize_progress,
            RanksLeftOut: self._left_out,
            VerdictReached: self._verdict,
            IncidentRecorded: self._incident,
            Notice: lambda event: self._display.line(event.message, ""),
            RunRestarted: self._warning,
            RunFallback: self._warning,
            WarningIssued: self._warning,
            GPUHealthChanged: self._gpu_health,
        }
        if title:
            self._display.line(title, "bold")

    def handle(self, event: EventBase) -> None:
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def close(self) -> None:
        self._stages.clear()
        self._display.close()

    def __str__(self) -> str:
        return "the progress display"

    def _update(self, key: str, event: EventBase, new: Stage, *, done: float, text: str = "") -> None:
        stage = self._stages.setdefault(key, new)
        stage.done, stage.now, stage.figures = done, event.moment, text
        self._display.show(self._stages.values(), stage)

    def _warning(self, event: RunRestarted | RunFallback | WarningIssued) -> None:
        self._warn(event.message)

    def _warn(self, message: str) -> None:
        self._display.line(f"warning: {message}", "yellow")

    def _gpu_health(self, event: GPUHealthChanged) -> None:
        if event.status == "ok":
            self._display.line(event.message, "")
        else:
            self._warn(event.message)

    def _run_started(self, event: RunStarted) -> None:
        self._output = Path(event.output)
        if self._speeds:
            self._earlier.append(self._own_speeds())
            self._speeds = {}

    def _plan(self, event: PlanMade) -> None:
        plan = event.plan
        processes = "1 process" if plan["world_size"] == 1 else f"{plan['world_size']} processes"
        frozen = f" over frozen {plan['frozen_weights']} weights" if plan.get("frozen_weights") else ""
        frozen += " with fp8 matmuls" if plan.get("fp8_matmuls") else ""
        self._done(
            f"plan: {processes} on {plan['device']}, {plan['precision']}{frozen}, "
            f"global batch {plan['global_batch_size']} in micro-batches of {plan['micro_batch_size']}"
        )

    def _data_progress(self, event: DataProgress) -> None:
        key, label = f"data {event.split}", f"{event.split} data: {event.stage}"
        if key in self._stages and self._stages[key].label != label:
            del self._stages[key]
        new = Stage(label, event.unit, event.moment, total=event.total)
        self._update(key, event, new, done=event.done)

    def _data_ready(self, event: DataReady) -> None:
        self._stages.pop(f"data {event.split}", None)
        parts = [
            f"{event.split} data: {figures.count(event.rows)} rows",
            f"{figures.count(event.tokens)} tokens",
            f"{figures.count(event.sequences)} x {figures.count(event.seq_len)}",
        ]
        if event.efficiency is not None:
            parts.append(f"{figures.share(event.efficiency)} filled")
        counts = {"skipped": event.skipped_rows, "truncated": event.truncated_rows}
        parts += [f"{figures.count(rows)} {what}" for what, rows in counts.items() if rows]
        parts.append("from cache" if event.cached else figures.duration(event.seconds))
        self._done(" · ".join(parts))

    def _model_ready(self, event: ModelReady) -> None:
        self._done(
            f"model: {event.architecture}, {figures.count(event.parameters)} parameters, "
            f"{figures.count(event.trainable_parameters)} trainable, {event.precision}"
        )

    def _train_started(self, event: TrainStarted) -> None:
        done = max(0, event.first_step - 1)
        if done and not self._earlier and not self._speeds:  # a resumed run gets only the events of this start
            self._earlier = speeds_of_starts(self._output)[:-1]
        self._stages["train"] = Stage("training", "steps", event.moment, done, done, event.total_steps)

    def _train_step(self, event: TrainStep) -> None:
        self._last_step = event
        if event.tokens_per_second is not None:
            self._speeds[event.step] = event.tokens_per_second
        parts = [f"loss {figures.loss(event.loss)}"]
        if self._eval_loss is not None:
            parts.append(f"eval {figures.loss(self._eval_loss)}")
        parts += [f"lr {figures.small(event.learning_rate)}", _pace(event.tokens_per_second, event.memory_bytes)]
        new = Stage("training", "steps", event.moment, event.step)
        self._update("train", event, new, done=event.step, text=" · ".join(parts))

    def _own_speeds(self) -> list[float]:
        """Speeds in the order of steps, some of which may have been rerun."""
        return [self._speeds[step] for step in sorted(self._speeds)]

    def _train_finished(self, event: TrainFinished) -> None:
        stage = self._stages.pop("train", None)
        parts = [f"trained to step {figures.count(event.steps)}"]
        if stage and stage.total and event.steps < stage.total:
            parts[0] += f" of {figures.count(stage.total)}, stopped by {event.stopped_by}"
        if stage:
            parts[0] += f" in {figures.duration(event.moment - stage.started)}"
        if self._last_step is not None:
            speed = median_speed([*self._earlier, self._own_speeds()])
            parts += [f"loss {figures.loss(self._last_step.loss)}", _pace(speed, self._last_step.memory_bytes)]
        self._done(" · ".join(parts))
        if event.concern:
            self._warn(event.concern)

    def _eval_progress(self, event: EvalProgress) -> None:
        new = Stage("evaluating", "sequences", event.moment, total=event.total)
        self._update("eval", event, new, done=event.done)

    def _eval_done(self, event: EvalDone) -> None:
        self._stages.pop("eval", None)
        self._eval_loss = event.loss
        self._done(
            f"step {event.step}: eval loss {figures.loss(event.loss)}, perplexity {figures.small(event.perplexity)}"
        )

    def _checkpoint_saved(self, event: CheckpointSaved) -> None:
        best = ", best so far" if event.best else ""
        cost = f"{figures.size(event.bytes)} in {figures.duration(event.seconds)}"
        self._done(f"step {event.step}: checkpoint saved ({cost}{best})")

    def _model_saved(self, event: ModelSaved) -> None:
        self._done(f"{event.form} saved: {self._output / event.path}")

    def _verify_progress(self, event: VerifyProgress) -> None:
        new = Stage("comparing with one process", "modes", event.moment, total=event.total)
        self._update("verify", event, new, done=event.done)

    def _left_out(self, event: RanksLeftOut) -> None:
        ranks = ", ".join(map(str, event.ranks))
        self._display.line(f"step {event.step}: the gradient of rank {ranks} is not finite and was left out", "yellow")

    def _generate_progress(self, event: GenerateProgress) -> None:
        new = Stage("generating", "prompts", event.moment, total=event.total)
        self._update("generate", event, new, done=event.done)

    def _generate_done(self, event: GenerateDone) -> None:
        self._stages.pop("generate", None)
        self._done(f"generated {figures.count(event.tokens)} tokens in {figures.duration(event.seconds)}")

    def _quantize_progress(self, event: QuantizeProgress) -> None:
        unit = "batches" if event.stage == "reading text" else "layers"
        self._update(event.stage, event, Stage(event.stage, unit, event.moment, total=event.total), done=event.done)

    def _verdict(self, event: VerdictReached) -> None:
        self._display.line(f"step {event.step}: {event.action} ({event.cause})", "yellow")

    def _incident(self, event: IncidentRecorded) -> None:
        self._display.line(f"step {event.step}: {event.finding}; see {event.path}", "yellow")

    def _done(self, text: str) -> None:
        self._display.line(text, "")


def _pace(tokens_per_second: float | None, memory_bytes: int | None) -> str:
    return f"{figures.count(tokens_per_second)} tokens/s · {figures.size(memory_bytes)}"


class _LiveDisplay:
    """Stages drawn in place at the bottom of a terminal, with a running clock."""

    def __init__(self, console: Console) -> None:
        self._stages: list[Stage] = []
        self._live = Live(
            console=console, get_renderable=self._draw, refresh_per_second=5, transient=True, vertical_overflow="crop"
        )

    def show(self, stages: Iterable[Stage], changed: Stage) -> None:
        del changed  # the live display draws all stages
        self._stages = list(stages)
        if not self._live.is_started:
            self._live.start()

    def line(self, text: str, style: str) -> None:
        self._live.console.print(Text(printable(text), style=style))

    def close(self) -> None:
        self._live.stop()

    def _draw(self) -> RenderableType:
        rows = Table.grid(padding=(0, 2))
        for stage in self._stages:
            left = stage.remaining_seconds()
            rows.add_row(
                Text(printable(stage.label), style="bold"),
                Bar(total=stage.total, completed=stage.done, width=30, pulse=stage.total is None),
                Text(stage.position()),
                Text(figures.clock(max(0.0, time.monotonic() - stage.started)), style="dim"),
                Text("" if left is None else f"{figures.clock(left)} left", style="cyan"),
            )
        details = [Text(f"  {stage.figures}", style="dim") for stage in self._stages if stage.figures]
        return Group(rows, *details)


class _LineDisplay:
    """Periodic lines, for log files and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._printed: dict[str, float] = {}

    def show(self, stages: Iterable[Stage], changed: Stage) -> None:
        del stages  # a line describes one stage
        wait = max(LINE_SECONDS, LINE_SHARE * (changed.now - changed.started))
        if changed.now - self._printed.get(changed.label, changed.started) < wait:
            return
        self._printed[changed.label] = changed.now
        left = changed.remaining_seconds()
        parts = [f"{changed.label} {changed.position()}", changed.figures]
        parts.append("" if left is None else f"{figures.clock(left)} left")
        self.line(" · ".join(part for part in parts if part), "")

    def line(self, text: str, style: str) -> None:
        del style  # no color outside terminals
        self._console.print(Text(printable(text)), soft_wrap=True)

    def close(self) -> None:
        """Nothing to close."""
