"""The screen of `pantheraml gpus`: one row per GPU with bars, then what is wrong, links, processes and the host.

On a narrow terminal the least important columns are dropped. Color marks state only: green, yellow and red are
health and heat; everything else is plain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from pantheraml.base.text import printable
from pantheraml.devices.background import HostSample
from pantheraml.devices.health import SLOWDOWNS, Health
from pantheraml.devices.inventory import GPUDetails, GPUProcess, Inventory
from pantheraml.devices.sampler import GPUSnapshot
from pantheraml.readers.number_format import UNKNOWN, size

HISTORY = 60
"""Samples that the sparklines show."""

BAR_WIDTH, LINE_COLUMNS, COLUMN_SECONDS = 10, 15, 4.0
WIDE, MEDIUM, NARROW = 118, 94, 70
"""Terminal widths from which more columns are shown."""
MAX_PROCESSES = 12
GIB = 2**30

NORMAL = {"software power cap": ", which is normal under load"}

_BLOCKS = " ▏▎▍▌▋▊▉█"
_LEVELS = "▁▂▃▄▅▆▇█"
_STATES = {"ok": ("●", "green"), "warn": ("▲", "yellow"), "fail": ("✖", "bold red"), None: ("○", "dim")}
_HOT, _WARM = 5, 15
"""Degrees below the slowdown temperature at which the temperature is red, yellow."""


class GPUTable:
    def __init__(
        self,
        inventory: Inventory,
        *,
        samples: Sequence[HostSample],
        health: Mapping[int, Health] | None = None,
        watching: bool = False,
    ) -> None:
        """`health`: more recent than the inventory's."""
        self._inventory, self._samples, self._watching = inventory, samples, watching
        self._health = {gpu.index: gpu.health for gpu in inventory.gpus} | dict(health or {})

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        parts: list[RenderableType] = [self._title(width)]
        if self._inventory.gpus:
            parts += [Text(), self._gpus(width), *self._troubles(), *self._links(), *self._processes(width)]
        else:
            parts += [Text(), Text(f"No GPU: {printable(self._inventory.note or 'none found')}")]
        yield Group(*parts, Text(), self._host())

    def _title(self, width: int) -> RenderableType:
        found = self._inventory
        facts = [found.host]
        facts += [f"driver {found.driver}"] if found.driver else []
        facts += [f"CUDA {found.cuda}"] if found.cuda else []
        title = Text(printable(" · ".join(facts)), style="bold")
        if not self._watching:
            return title
        grid = Table.grid(expand=True)
        grid.add_column()
        grid.add_column(justify="right")
        grid.add_row(title, Text(f"{datetime.now():%H:%M:%S} · Ctrl-C ends", style="dim"))
        return grid

    # -- one row per GPU

    def _gpus(self, width: int) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
        table.add_column("GPU", justify="right", no_wrap=True)
        table.add_column("name", no_wrap=True, overflow="ellipsis", max_width=26 if width >= WIDE else 18)
        table.add_column("health", no_wrap=True)
        table.add_column("load", no_wrap=True)
        table.add_column("memory", no_wrap=True)
        table.add_column("temp", justify="right", no_wrap=True)
        if width >= NARROW:
            table.add_column("power", justify="right", no_wrap=True)
        if width >= WIDE:
            table.add_column("clock", justify="right", no_wrap=True)
        for gpu in self._inventory.gpus:
            table.add_row(*self._row(gpu, width))
        return table

    def _row(self, gpu: GPUDetails, width: int) -> list[RenderableType]:
        now = self._newest(gpu.index)
        cells: list[RenderableType] = [
            str(gpu.index),
            Text(printable(gpu.name.removeprefix("NVIDIA "))),
            self._state(gpu.index),
            self._load(gpu.index, now, width),
            _memory(gpu, now, width),
            self._temperature(gpu.index, now),
        ]
        if width >= NARROW:
            watts = None if now is None else now.power_watts
            limit = UNKNOWN if gpu.power_limit_watts is None else f"{gpu.power_limit_watts:.0f}"
            cells.append(_dash(watts, f"{watts or 0:.0f}/{limit} W"))
        if width >= WIDE:
            clock = None if now is None else now.sm_clock_mhz
            cells.append(_dash(clock, f"{clock or 0:,} MHz"))
        return cells

    def _newest(self, index: int) -> GPUSnapshot | None:
        if not self._samples:
            return None
        return next((gpu for gpu in self._samples[-1].gpus if gpu.index == index), None)

    def _state(self, index: int) -> Text:
        status = self._health[index].status
        mark, style = _STATES[status]
        return Text(f"{mark} {status or 'unknown'}", style=style)

    def _load(self, index: int, now: GPUSnapshot | None, width: int) -> Text:
        percent = None if now is None else now.utilization_percent
        if percent is None:
            return Text(UNKNOWN, style="dim")
        text = Text.assemble(bar(percent / 100), f" {percent:3d} %")
        if self._watching and width >= MEDIUM:
            past = [(sample.clock, gpu) for sample in self._samples for gpu in sample.gpus if gpu.index == index]
            line = sparkline([(clock, gpu.utilization_percent) for clock, gpu in past])
            text.append(f"  {line:>{LINE_COLUMNS}}", style="cyan")
        return text

    def _temperature(self, index: int, now: GPUSnapshot | None) -> Text:
        degrees = None if now is None else now.temperature_celsius
        if degrees is None:
            return Text(UNKNOWN, style="dim")
        margin = next((gpu.thermal_margin for gpu in self._inventory.gpus if gpu.index == index), None)
        style = "" if margin is None else "red" if margin <= _HOT else "yellow" if margin <= _WARM else ""
        return Text(f"{degrees} °C", style=style)

    # -- below the table

    def _troubles(self) -> list[RenderableType]:
        lines = []
        gravest = ("fail", "warn", "ok", None)
        for index, health in sorted(self._health.items(), key=lambda item: (gravest.index(item[1].status), item[0])):
            mark, style = _STATES[health.status]
            lines += [
                Text.assemble((f"{mark} ", style), f"GPU {index}: {printable(reason)}") for reason in health.reasons
            ]
        for reason, indices in self._limited().items():
            lines.append(
                Text(f"  GPU {runs(indices)}: clocks limited by {reason}{NORMAL.get(reason, '')}", style="dim")
            )
        return [Text(), *lines] if lines else []

    def _limited(self) -> dict[str, list[int]]:
        """Group GPUs by reasons that limit their clocks but are no health problem, such as a power cap."""
        found: dict[str, list[int]] = {}
        for gpu in self._samples[-1].gpus if self._samples else ():
            for reason in gpu.event_reasons or ():
                if reason != "idle" and reason not in SLOWDOWNS:
                    found.setdefault(reason, []).append(gpu.index)
        return found

    def _links(self) -> list[RenderableType]:
        text = describe_links(self._inventory)
        return [Text(), Text(text, style="dim")] if text else []

    def _processes(self, width: int) -> list[RenderableType]:
        rows = [(gpu, process) for gpu in self._inventory.gpus for process in gpu.processes or ()]
        if not rows:
            return []
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
        for name, justify in (("GPU", "right"), ("memory", "right"), ("PID", "right"), ("user", "left")):
            table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        table.add_column("process", no_wrap=True, overflow="ellipsis", max_width=max(20, width - 44))
        rows.sort(key=lambda row: (row[0].index, -(row[1].memory_bytes or 0)))
        for gpu, process in rows[:MAX_PROCESSES]:
            table.add_row(*_process(gpu.index, process))
        more = [Text(f"and {len(rows) - MAX_PROCESSES} more", style="dim")] if len(rows) > MAX_PROCESSES else []
        return [Text(), table, *more]

    def _host(self) -> Text:
        found, sample = self._inventory, self._samples[-1] if self._samples else None
        percent = None if sample is None else sample.cpu_percent
        load = "" if percent is None else f", {percent:.0f} % busy"
        used = found.ram_bytes - found.ram_available_bytes if sample is None else sample.ram_used_bytes
        memory = f"RAM: {size(used)} of {size(found.ram_bytes)} in use"
        return Text(f"CPU: {found.cpu_count} cores{load} · {memory}", style="dim")


def bar(share: float, width: int = BAR_WIDTH) -> Text:
    """Return a horizontal bar with a resolution of an eighth of a character."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    full, part = divmod(eighths, 8)
    drawn = "█" * full + (_BLOCKS[part] if part else "")
    return Text.assemble(drawn, (("·" * (width - len(drawn))), "dim"))


def runs(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 -> '0-2, 5'."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def sparkline(values: Sequence[tuple[float, float | None]]) -> str:
    """Percentages by time, as blocks of eight heights: a column is the mean of `COLUMN_SECONDS`, the newest is last.

    Columns begin at multiples of that time, so that a value stays in its column while the line moves.
    """
    columns: dict[int, list[float]] = {}
    for clock, value in values:
        columns.setdefault(int(clock // COLUMN_SECONDS), []).extend([] if value is None else [value])
    if not columns:
        return ""
    last = max(columns)
    drawn = range(max(min(columns), last - LINE_COLUMNS + 1), last + 1)
    return "".join(_level(columns.get(column, [])) for column in drawn)


def _level(known: Sequence[float]) -> str:
    if not known:
        return " "
    return _LEVELS[min(7, int(sum(known) / len(known) / 100 * 8))]


def describe_links(inventory: Inventory) -> str:
    """How the GPUs reach each other, in one line; empty for a single GPU."""
    gpus = inventory.gpus
    if len(gpus) < 2:
        return ""
    pairs = [inventory.connections[a][b] for a in range(len(gpus)) for b in range(a)]
    if len(set(pairs)) == 1:
        counts = {gpu.nvlinks for gpu in gpus}
        (links,) = counts if len(counts) == 1 else (None,)
        each = f" ({links[0]} links each)" if pairs[0] == "NVLink" and links is not None else ""
        return f"links: {pairs[0] or 'not known'}{each} between all GPUs"
    counted = {name: pairs.count(name) for name in dict.fromkeys(pairs)}
    return "links: " + ", ".join(f"{count} pairs by {name or 'unknown'}" for name, count in counted.items())


def _memory(gpu: GPUDetails, now: GPUSnapshot | None, width: int) -> Text:
    used = None if now is None else now.used_bytes
    total = gpu.total_bytes
    if used is None or not total:
        return Text(size(total), style="" if total else "dim")
    figures = f"{used / GIB:5.1f}/{total / GIB:.0f} GiB"
    return Text.assemble(bar(used / total), f" {figures}") if width >= MEDIUM else Text(figures)


def _process(index: int, process: GPUProcess) -> tuple[RenderableType, ...]:
    return (
        str(index),
        size(process.memory_bytes),
        str(process.pid),
        _dash(process.user, printable(process.user or "")),
        _dash(process.command, printable(process.command or "")),
    )


def _dash(value: object, text: str) -> Text:
    return Text(UNKNOWN, style="dim") if value is None else Text(text)
