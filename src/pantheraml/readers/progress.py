"""The progress display: a live bar on a terminal, plain lines in a log file.

`ProgressBar` turns events into two things: the stages that are under way (tokenising, training, evaluating, ...) and
lines that are worth keeping. A display shows them: `_LiveDisplay` draws the stages in place and keeps lines above them,
`_LineDisplay` prints a line every few seconds. Both write to stderr unless told otherwise; stdout is for results.
Errors are not shown here: the command line prints them once, at the end.
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

from pantheraml.base.events import Event, moment, number
from pantheraml.base.text import printable
from pantheraml.readers import figures
from pantheraml.readers.summary import median_speed, speeds_of_starts

# A plain line every 5 s at first, later every 2 % of a stage's age: about 100 lines for an hour, 200 for ten.
LINE_SECONDS = 5.0
LINE_SHARE = 0.02


@dataclass
class Stage:
    """A piece of work that is under way; times are the events' own (`moment`)."""

    label: str
    unit: str
    started: float
    begun_at: float = 0
    """Where `done` stood at the start: a resumed training does not begin at zero."""
    done: float = 0
    total: float | None = None
    now: float = 0.0
    figures: str = ""

    def remaining_seconds(self) -> float | None:
        """At the pace so far; None while there is no pace yet or no known end."""
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
    """Shows a run's progress. `console` defaults to stderr; a console that is no terminal gets plain lines."""

    def __init__(self, title: str = "", *, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self._stages: dict[str, Stage] = {}
        self._eval_loss: Any = None
        self._last_step: Event | None = None
        self._speeds: dict[int, float] = {}
        """Of this start's steps; below, of those of each earlier one."""
        self._earlier: list[list[float]] = []
        self._output = Path()
        self._display: _Display = _LiveDisplay(console) if console.is_terminal else _LineDisplay(console)
        self._handlers: dict[str, Callable[[Event], None]] = {
            "run.started": self._run_started,
            "plan.made": self._plan,
            "data.progress": self._data_progress,
            "data.ready": self._data_ready,
            "model.ready": self._model_ready,
            "train.started": self._train_started,
            "train.step": self._train_step,
            "train.finished": self._train_finished,
            "eval.progress": self._eval_progress,
            "eval.done": self._eval_done,
            "checkpoint.saved": self._checkpoint_saved,
            "model.saved": self._model_saved,
            "generate.progress": self._generate_progress,
            "generate.done": self._generate_done,
            "verify.progress": self._verify_progress,
            "quantise.progress": self._quantise_progress,
            "aggregation.left_out": self._left_out,
            "verdict": self._verdict,
            "incident": self._incident,
            "notice": lambda event: self._display.line(event["message"], ""),
            "run.restarted": self._warning,
            "run.fallback": self._warning,
            "warning": self._warning,
        }
        if title:
            self._display.line(title, "bold")

    def handle(self, event: Event) -> None:
        handler = self._handlers.get(event["kind"])
        if handler is not None:
            handler(event)

    def close(self) -> None:
        self._stages.clear()
        self._display.close()

    def __str__(self) -> str:
        return "the progress display"

    def _update(self, key: str, event: Event, new: Stage, *, done: float, text: str = "") -> None:
        stage = self._stages.setdefault(key, new)
        stage.done, stage.now, stage.figures = done, moment(event), text
        self._display.show(self._stages.values(), stage)

    def _warning(self, event: Event) -> None:
        self._display.line(f"warning: {event['message']}", "yellow")

    def _run_started(self, event: Event) -> None:
        self._output = Path(event["output"])
        if self._speeds:
            self._earlier.append(self._own_speeds())
            self._speeds = {}

    def _plan(self, event: Event) -> None:
        plan = event["plan"]
        processes = "1 process" if plan["world_size"] == 1 else f"{plan['world_size']} processes"
        frozen = f" over frozen {plan['frozen_weights']} weights" if plan.get("frozen_weights") else ""
        frozen += " with products in fp8" if plan.get("fp8_products") else ""
        self._done(
            f"plan: {processes} on {plan['device']}, {plan['precision']}{frozen}, "
            f"global batch {plan['global_batch_size']} in micro-batches of {plan['micro_batch_size']}"
        )

    def _data_progress(self, event: Event) -> None:
        key, label = f"data {event['split']}", f"{event['split']} data: {event['stage']}"
        if key in self._stages and self._stages[key].label != label:
            del self._stages[key]
        new = Stage(label, event["unit"], moment(event), total=event["total"])
        self._update(key, event, new, done=event["done"])

    def _data_ready(self, event: Event) -> None:
        self._stages.pop(f"data {event['split']}", None)
        parts = [
            f"{event['split']} data: {figures.count(event['rows'])} rows",
            f"{figures.count(event['tokens'])} tokens",
            f"{figures.count(event['sequences'])} x {figures.count(event['seq_len'])}",
        ]
        if event["efficiency"] is not None:
            parts.append(f"{figures.share(event['efficiency'])} full")
        parts += [f"{figures.count(event[f'{what}_rows'])} {what}" for what in ("skipped", "truncated")
                  if event[f"{what}_rows"]]  # fmt: skip
        parts.append("from cache" if event["cached"] else figures.duration(event["seconds"]))
        self._done(" · ".join(parts))

    def _model_ready(self, event: Event) -> None:
        self._done(
            f"model: {event['architecture']}, {figures.count(event['parameters'])} parameters, "
            f"{figures.count(event['trainable_parameters'])} trained, {event['precision']}"
        )

    def _train_started(self, event: Event) -> None:
        done = max(0, event["first_step"] - 1)
        if done and not self._earlier and not self._speeds:  # of a resumed run only this start's events come
            self._earlier = speeds_of_starts(self._output)[:-1]
        self._stages["train"] = Stage("training", "steps", moment(event), done, done, event["total_steps"])

    def _train_step(self, event: Event) -> None:
        self._last_step = event
        speed = number(event["tokens_per_second"])
        if speed is not None:
            self._speeds[event["step"]] = speed
        parts = [f"loss {figures.loss(event['loss'])}"]
        if self._eval_loss is not None:
            parts.append(f"eval {figures.loss(self._eval_loss)}")
        parts += [f"lr {figures.small(event['learning_rate'])}", _pace(event)]
        new = Stage("training", "steps", moment(event), event["step"])
        self._update("train", event, new, done=event["step"], text=" · ".join(parts))

    def _own_speeds(self) -> list[float]:
        """In the order of steps, some of which may have been taken again."""
        return [self._speeds[step] for step in sorted(self._speeds)]

    def _train_finished(self, event: Event) -> None:
        stage = self._stages.pop("train", None)
        parts = [f"trained to step {figures.count(event['steps'])}"]
        if stage and stage.total and event["steps"] < stage.total:
            parts[0] += f" of {figures.count(stage.total)}, stopped by {event['stopped_by']}"
        if stage:
            parts[0] += f" in {figures.duration(moment(event) - stage.started)}"
        if self._last_step is not None:
            whole = {**self._last_step, "tokens_per_second": median_speed([*self._earlier, self._own_speeds()])}
            parts += [f"loss {figures.loss(self._last_step['loss'])}", _pace(whole)]
        self._done(" · ".join(parts))
        if event.get("concern"):
            self._warning({"message": event["concern"]})

    def _eval_progress(self, event: Event) -> None:
        new = Stage("evaluating", "sequences", moment(event), total=event["total"])
        self._update("eval", event, new, done=event["done"])

    def _eval_done(self, event: Event) -> None:
        self._stages.pop("eval", None)
        self._eval_loss = event["loss"]
        self._done(
            f"step {event['step']}: eval loss {figures.loss(event['loss'])}, "
            f"perplexity {figures.small(event['perplexity'])}"
        )

    def _checkpoint_saved(self, event: Event) -> None:
        best = ", the best so far" if event["best"] else ""
        took = f"{figures.size(event['bytes'])} in {figures.duration(event['seconds'])}"
        self._done(f"step {event['step']}: checkpoint saved ({took}{best})")

    def _model_saved(self, event: Event) -> None:
        self._done(f"{event['form']} saved: {self._output / event['path']}")

    def _verify_progress(self, event: Event) -> None:
        new = Stage("comparing with one process", "modes", moment(event), total=event["total"])
        self._update("verify", event, new, done=event["done"])

    def _left_out(self, event: Event) -> None:
        ranks = ", ".join(map(str, event["ranks"]))
        self._display.line(
            f"step {event['step']}: the gradient of rank {ranks} is not finite and was left out", "yellow"
        )

    def _generate_progress(self, event: Event) -> None:
        new = Stage("generating", "prompts", moment(event), total=event["total"])
        self._update("generate", event, new, done=event["done"])

    def _generate_done(self, event: Event) -> None:
        self._stages.pop("generate", None)
        self._done(f"generated {figures.count(event['tokens'])} tokens in {figures.duration(event['seconds'])}")

    def _quantise_progress(self, event: Event) -> None:
        unit = "batches" if event["stage"] == "reading text" else "layers"
        self._update(
            event["stage"], event, Stage(event["stage"], unit, moment(event), total=event["total"]), done=event["done"]
        )

    def _verdict(self, event: Event) -> None:
        self._display.line(f"step {event['step']}: {event['action']} ({event['cause']})", "yellow")

    def _incident(self, event: Event) -> None:
        self._display.line(f"step {event['step']}: {event['finding']}; see {event['path']}", "yellow")

    def _done(self, text: str) -> None:
        self._display.line(text, "")


def _pace(step: Event) -> str:
    return f"{figures.count(step['tokens_per_second'])} tokens/s · {figures.size(step['memory_bytes'])}"


class _LiveDisplay:
    """Stages drawn in place at the foot of a terminal; a clock keeps moving between events."""

    def __init__(self, console: Console) -> None:
        self._stages: list[Stage] = []
        self._live = Live(
            console=console, get_renderable=self._draw, refresh_per_second=5, transient=True, vertical_overflow="crop"
        )

    def show(self, stages: Iterable[Stage], changed: Stage) -> None:
        del changed  # the live display draws all of them
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
    """One line now and then, for log files and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._printed: dict[str, float] = {}

    def show(self, stages: Iterable[Stage], changed: Stage) -> None:
        del stages  # one line speaks of one stage
        wait = max(LINE_SECONDS, LINE_SHARE * (changed.now - changed.started))
        if changed.now - self._printed.get(changed.label, changed.started) < wait:
            return
        self._printed[changed.label] = changed.now
        left = changed.remaining_seconds()
        parts = [f"{changed.label} {changed.position()}", changed.figures]
        parts.append("" if left is None else f"{figures.clock(left)} left")
        self.line(" · ".join(part for part in parts if part), "")

    def line(self, text: str, style: str) -> None:
        del style  # colour belongs on terminals
        self._console.print(Text(printable(text)), soft_wrap=True)

    def close(self) -> None:
        """Nothing is held open."""
