"""The screen of `pantheraml watch`: progress, figures, the loss so far, GPUs, and the latest messages.

Redrawn twice a second for the terminal's current size, so that resizing works at once; what does not fit is dropped
from the bottom. Color marks state only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pantheraml.base.events import HardwareSampled
from pantheraml.base.text import printable
from pantheraml.cli.gpu_table import bar
from pantheraml.readers import number_format as figures
from pantheraml.readers.hardware import at
from pantheraml.readers.recorded_run import name_of
from pantheraml.readers.run_state import LogMessage, RunState

REFRESH_PER_SECOND = 2
QUIET_SECONDS = 45.0
"""Seconds without an event after which the screen says so."""
MAX_GPUS = 16
_LEVELS = "▁▂▃▄▅▆▇█"
_STATUS = {"succeeded": "green", "running": "cyan", "failed": "bold red", "crashed": "bold red"}
_MARKS = {"info": ("·", "dim"), "warn": ("▲", "yellow"), "error": ("✖", "bold red")}


@contextmanager
def showing(state: RunState, folder: Path, console: Console) -> Iterator[None]:
    """Draw on the alternate screen; the last state stays on the terminal."""
    view = WatchView(state, folder)
    try:
        with Live(view, console=console, screen=True, refresh_per_second=REFRESH_PER_SECOND):
            yield
    finally:
        view.watching = False
        console.print(view)


class WatchView:
    def __init__(self, state: RunState, folder: Path) -> None:
        self._state, self._folder = state, folder
        self.watching = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        parts: list[RenderableType] = [self._title(), Text(), *self._progress(width), Text(), self._figures(width)]
        parts += self._loss(width)
        parts += self._gpus(width)
        used = sum(len(console.render_lines(part, options)) for part in parts)
        room = max(3, console.height - used - 2) if self.watching else 10
        yield Group(*parts, *_messages(self._state.messages, room))

    def _title(self) -> RenderableType:
        state = self._state
        grid = Table.grid(expand=True)
        grid.add_column(no_wrap=True, overflow="ellipsis")
        grid.add_column(justify="right", no_wrap=True)
        name = Text.assemble(
            (printable(name_of(self._folder)), "bold"), "  ", (state.status, _STATUS.get(state.status, "yellow"))
        )
        plan = {} if state.plan is None else state.plan.plan
        facts = [f"{plan['world_size']} × {plan['device']}, {plan['precision']}"] if _has_plan(plan) else []
        facts += [f"{figures.count(state.model.trainable_parameters)} trained"] if state.model is not None else []
        name.append(f"  {' · '.join(printable(fact) for fact in facts)}", style="dim")
        grid.add_row(name, Text(f"{datetime.now():%H:%M:%S} · Ctrl-C leaves" if self.watching else "", style="dim"))
        return grid

    def _progress(self, width: int) -> list[RenderableType]:
        state = self._state
        ended = state.finished is not None
        activity = "ended" if ended else state.activity
        if state.total:
            share = state.done / state.total
            room = max(10, min(50, width - 60))
            count = f"{figures.count(state.done)} of {figures.count(state.total)}"
            line = Text.assemble((f"{activity}  ", "bold"), bar(share, room), f"  {100 * share:.0f} %  {count}")
        else:
            line = Text(activity, style="bold")
        left = state.remaining_seconds()
        if left is not None:
            line.append(f"  {figures.clock(left)} left", style="cyan")
        if ended and state.finished is not None:
            line.append(f"  after {figures.duration(state.finished.seconds)}", style="dim")
        silence = None if ended or state.last_time is None else time.time() - state.last_time
        if silence is None or silence < QUIET_SECONDS:
            return [line]
        return [line, Text(f"no event for {figures.clock(silence)}", style="yellow")]

    def _figures(self, width: int) -> Table:
        step, evaluation, saved = self._state.step, self._state.evaluation, self._state.checkpoint
        cells = [
            ("loss", figures.loss(step.loss if step else None)),
            ("eval loss", figures.loss(evaluation.loss if evaluation else None)),
            ("learning rate", figures.small(step.learning_rate if step else None)),
            ("gradient norm", figures.small(step.grad_norm if step else None)),
            ("tokens/s", figures.count(step.tokens_per_second if step else None)),
            ("memory", figures.size(step.memory_bytes if step else None)),
            ("epoch", figures.UNKNOWN if step is None else f"{step.epoch:.2f}"),
            ("checkpoint", figures.UNKNOWN if saved is None else f"step {figures.count(saved.step)}"),
        ]
        per_row = next((count for count in (8, 4) if width >= 14 * count), 2)
        table = Table.grid(padding=(0, 3, 0, 0))
        for first in range(0, len(cells), per_row):
            row = cells[first : first + per_row]
            table.add_row(*(Text(name, style="dim") for name, _ in row))
            table.add_row(*(Text(value) for _, value in row))
        return table

    def _loss(self, width: int) -> list[RenderableType]:
        known = [(step, loss) for step, loss in self._state.losses if math.isfinite(loss)]
        if len(known) < 2:
            return []
        line = loss_line([loss for _, loss in known], max(10, min(100, width - 26)))
        low, high = min(loss for _, loss in known), max(loss for _, loss in known)
        return [
            Text(),
            Text.assemble(("loss ", "dim"), (line, "cyan"), (f"  {figures.loss(low)} to {figures.loss(high)}", "dim")),
        ]

    def _gpus(self, width: int) -> list[RenderableType]:
        sample = self._state.sample
        if sample is None:
            return []
        if not sample.indices:
            cpu = figures.UNKNOWN if sample.cpu_percent is None else f"{sample.cpu_percent:.0f} %"
            return [Text(), Text(f"CPU {cpu} · RAM {figures.size(sample.ram_bytes)}", style="dim")]
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
        for name in ("GPU", "load", "memory", "temp", "power"):
            table.add_column(name, no_wrap=True, justify="right" if name in ("GPU", "temp", "power") else "left")
        for position, index in enumerate(sample.indices[:MAX_GPUS]):
            table.add_row(str(index), *self._gpu(sample, position, width))
        more = len(sample.indices) - MAX_GPUS
        return [Text(), table, *([Text(f"and {more} more", style="dim")] if more > 0 else [])]

    def _gpu(self, sample: HardwareSampled, position: int, width: int) -> list[Text]:
        load, memory = at(sample.utilization_percent, position), at(sample.memory_bytes, position)
        heat, power = at(sample.temperature_celsius, position), at(sample.power_watts, position)
        found = self._state.hardware
        index = sample.indices[position]
        total = next((gpu.total_bytes for gpu in found.gpus if gpu.index == index), None) if found else None
        of = f"{figures.size(memory)} of {figures.size(total)}" if total else figures.size(memory)
        drawn = Text() if load is None or width < 70 else bar(load / 100)
        share = Text() if memory is None or not total or width < 70 else bar(memory / total)
        return [
            Text.assemble(drawn, f" {_unit(load, '%')}"),
            Text.assemble(share, f" {of}"),
            Text(_unit(heat, "°C")),
            Text(_unit(power, "W")),
        ]


def loss_line(losses: Sequence[float], width: int) -> str:
    """Means of equal parts of the run, as blocks of eight heights between the lowest and the highest part."""
    parts = min(width, len(losses))
    means = []
    for part in range(parts):
        values = losses[part * len(losses) // parts : (part + 1) * len(losses) // parts]
        means.append(sum(values) / len(values))
    low, high = min(means), max(means)
    scale = (len(_LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(_LEVELS[round((mean - low) * scale)] for mean in means)


def _messages(messages: Sequence[LogMessage], room: int) -> list[RenderableType]:
    """Return the newest messages that fit, one line each."""
    if not messages:
        return []
    lines: list[Any] = [Text()]
    for message in list(messages)[-room:]:
        mark, style = _MARKS[message.level]
        at_time = datetime.fromtimestamp(message.time).strftime("%H:%M:%S")
        text = " ".join(printable(message.text).split())
        lines.append(
            Text.assemble((f"{at_time} ", "dim"), (f"{mark} ", style), text, no_wrap=True, overflow="ellipsis")
        )
    return lines


def _has_plan(plan: dict[str, Any]) -> bool:
    return all(plan.get(name) is not None for name in ("world_size", "device", "precision"))


def _unit(value: float | None, unit: str) -> str:
    return figures.UNKNOWN if value is None else f"{value:.0f} {unit}"
