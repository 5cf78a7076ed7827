"""Aggregate a run's telemetry events per GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pantheraml.base.events import HardwareSampled


@dataclass
class GPUTotals:
    """One GPU over a run; None: not known."""

    index: int
    weighted: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    highest: dict[str, float] = field(default_factory=dict)
    energy_joules: float | None = None
    lowered_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of the intervals in which clocks were lowered, by reason."""

    def mean(self, name: str) -> float | None:
        return self.weighted[name] / self.weights[name] if self.weights.get(name) else None

    def add(self, event: HardwareSampled, position: int) -> None:
        for name in ("utilization_percent", "power_watts"):
            value, weight = at(getattr(event, name), position), max(event.seconds, 1e-9)
            if value is not None:
                self.weighted[name] = self.weighted.get(name, 0.0) + value * weight
                self.weights[name] = self.weights.get(name, 0.0) + weight
        for name in ("memory_bytes", "temperature_celsius"):
            value = at(getattr(event, name), position)
            if value is not None:
                self.highest[name] = max(self.highest.get(name, value), value)
        if (energy := at(event.energy_joules, position)) is not None:
            self.energy_joules = (self.energy_joules or 0.0) + energy
        reasons = event.event_reasons[position] if position < len(event.event_reasons) else None
        for reason in reasons or ():
            self.lowered_seconds[reason] = self.lowered_seconds.get(reason, 0.0) + event.seconds


def at(values: Sequence[float | None], position: int) -> float | None:
    """Return a value of a column, which older versions may not have written."""
    return values[position] if position < len(values) else None


def totals(events: Sequence[HardwareSampled]) -> dict[int, GPUTotals]:
    """Figures of each GPU, by index."""
    found: dict[int, GPUTotals] = {}
    for event in events:
        for position, index in enumerate(event.indices):
            found.setdefault(index, GPUTotals(index)).add(event, position)
    return dict(sorted(found.items()))


def mean_utilization(events: Sequence[HardwareSampled]) -> float | None:
    """Percent, over all GPUs and the whole run."""
    known = [mean for each in totals(events).values() if (mean := each.mean("utilization_percent")) is not None]
    return round(sum(known) / len(known), 1) if known else None


def energy_joules(events: Sequence[HardwareSampled]) -> float | None:
    """Energy that all GPUs used; None if any does not report it, since a part would look like the whole."""
    used = [each.energy_joules for each in totals(events).values()]
    known = [energy for energy in used if energy is not None]
    return round(sum(known), 1) if known and len(known) == len(used) else None
