"""The report's timeline of GPUs and host, and a table of the GPUs, from the telemetry events.

Time is that of sampling, so that a pause between two starts of a run takes no room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pantheraml.base.events import EventBase, GPUHealthChanged, HardwareFound, HardwareSampled, RunStarted
from pantheraml.readers import number_format as figures
from pantheraml.readers.hardware import GPUTotals, at, totals
from pantheraml.readers.report_charts import GIB, Chart, ChartSeries, Point
from pantheraml.readers.report_page import chart_cards, escape, table

HOURS_FROM = 3 * 3600.0
"""Seconds from which on the time axis is in hours."""

JOULES_PER_KWH = 3.6e6

COLUMNS = ("GPU", "name", "utilization", "memory, most", "temperature, most", "power", "energy", "clocks lowered by",
           "health")  # fmt: skip

_COLUMN_CHARTS = (
    ("GPU utilization, %", "utilization_percent", 1.0, 100.0),
    ("GPU memory in use, GiB", "memory_bytes", 1 / GIB, None),
    ("GPU power, W", "power_watts", 1.0, None),
    ("GPU temperature, °C", "temperature_celsius", 1.0, None),
)


def hardware_charts(events: Sequence[EventBase]) -> list[Chart]:
    """Return charts over time, of the GPUs, if any, and of the host."""
    timed = _timed(events)
    if not timed:
        return []
    hours = timed[-1][0] >= HOURS_FROM
    unit, scale = ("hours", 1 / 3600) if hours else ("minutes", 1 / 60)
    indices = sorted({index for _, event in timed if event is not None for index in event.indices})
    found = []
    for title, name, factor, top in _COLUMN_CHARTS:
        lines = [(index, _points(timed, _reader(name, index, factor), scale)) for index in indices]
        known = [(index, points) for index, points in lines if any(value is not None for _, value in points)]
        if known:
            found.append(Chart(title, _series(known), _note(len(known)), from_zero=True, x=unit, top=top))
    cpu = _points(timed, lambda event: event.cpu_percent, scale)
    ram = _points(timed, lambda event: event.ram_bytes / GIB, scale)
    if any(value is not None for _, value in cpu):
        found.append(Chart("Host CPU, %", (ChartSeries("CPU", "other", cpu),), from_zero=True, x=unit, top=100.0))
    found.append(Chart("Host memory in use, GiB", (ChartSeries("memory", "other", ram),), from_zero=True, x=unit))
    return found


def _timed(events: Sequence[EventBase]) -> list[tuple[float, HardwareSampled | None]]:
    """Each event with the seconds sampled up to it; None where the run was started again."""
    found: list[tuple[float, HardwareSampled | None]] = []
    elapsed = 0.0
    for event in events:
        if isinstance(event, HardwareSampled):
            elapsed += event.seconds
            found.append((elapsed, event))
        elif isinstance(event, RunStarted) and found and found[-1][1] is not None:
            found.append((elapsed, None))
    while found and found[-1][1] is None:
        found.pop()
    return found


def _reader(name: str, index: int, factor: float) -> Callable[[HardwareSampled], float | None]:
    def read(event: HardwareSampled) -> float | None:
        if index not in event.indices:
            return None
        value = at(getattr(event, name), event.indices.index(index))
        return None if value is None else value * factor

    return read


def _points(
    timed: Sequence[tuple[float, HardwareSampled | None]], read: Callable[[HardwareSampled], float | None], scale: float
) -> list[Point]:
    return [(round(seconds * scale, 4), None if event is None else read(event)) for seconds, event in timed]


def _series(lines: Sequence[tuple[int, list[Point]]]) -> tuple[ChartSeries, ...]:
    if len(lines) == 1:
        return (ChartSeries(f"GPU {lines[0][0]}", "train", lines[0][1]),)
    each = [ChartSeries(f"GPU {index}", "faint", points, in_legend=False) for index, points in lines]
    mean: list[Point] = []
    for row in zip(*(points for _, points in lines), strict=True):
        known = [value for _, value in row if value is not None]
        mean.append((row[0][0], sum(known) / len(known) if known else None))
    return (*each, ChartSeries("mean", "train", mean, in_legend=False))


def _note(lines: int) -> str:
    return "Thin lines: each GPU. Thick line: their mean." if lines > 1 else ""


def hardware_part(events: Sequence[EventBase], drawn: Sequence[Chart], *, first_chart: int) -> str:
    """The section of the page; empty without telemetry."""
    if not drawn:
        return ""
    cards = chart_cards([(chart.title, chart.note) for chart in drawn], first=first_chart)
    return f"<h2>Hardware</h2>{_facts(events)}{cards}{_table(events)}"


def _facts(events: Sequence[EventBase]) -> str:
    found = _last(events)
    if found is None:
        return ""
    facts = [found.host, f"{found.cpu_count} CPU cores", f"{figures.size(found.ram_bytes)} RAM"]
    if found.driver is not None:
        facts.append(f"driver {found.driver}")
    if found.cuda is not None:
        facts.append(f"CUDA {found.cuda}")
    return f'<p class="soft">{escape(" · ".join(facts))}</p>'


def _last(events: Sequence[EventBase]) -> HardwareFound | None:
    return next((event for event in reversed(events) if isinstance(event, HardwareFound)), None)


def _table(events: Sequence[EventBase]) -> str:
    measured = totals([event for event in events if isinstance(event, HardwareSampled)])
    if not measured:
        return ""
    found = _last(events)
    known = {} if found is None else {gpu.index: gpu for gpu in found.gpus}
    health = {event.index: event for event in events if isinstance(event, GPUHealthChanged)}
    rows = []
    for index, gpu in measured.items():
        identity = known.get(index)
        total = None if identity is None else identity.total_bytes
        rows.append(
            (
                index,
                figures.UNKNOWN if identity is None else identity.name,
                _unit(gpu.mean("utilization_percent"), "%"),
                figures.size(gpu.highest.get("memory_bytes")) + (f" of {figures.size(total)}" if total else ""),
                _unit(gpu.highest.get("temperature_celsius"), "°C"),
                _unit(gpu.mean("power_watts"), "W"),
                _energy(gpu.energy_joules),
                _lowered(gpu),
                _health(health.get(index), None if identity is None else identity.health),
            )
        )
    return table(COLUMNS, rows, numbers=frozenset({0, *range(2, 7)}))


def _unit(value: float | None, unit: str) -> str:
    return figures.UNKNOWN if value is None else f"{value:,.0f} {unit}"


def _energy(joules: float | None) -> str:
    if joules is None:
        return figures.UNKNOWN
    return f"{joules:,.0f} J" if joules < JOULES_PER_KWH / 1000 else f"{joules / JOULES_PER_KWH:,.3g} kWh"


def _lowered(gpu: GPUTotals) -> str:
    reasons = {name: seconds for name, seconds in gpu.lowered_seconds.items() if name != "idle" and seconds > 0}
    return "\n".join(f"{name} ({figures.duration(seconds)})" for name, seconds in reasons.items()) or figures.UNKNOWN


def _health(event: GPUHealthChanged | None, at_start: str | None) -> str:
    if event is None:
        return at_start or "not known"
    status = event.status or "not known"
    return f"{status}: {'; '.join(event.reasons)}" if event.reasons else status
