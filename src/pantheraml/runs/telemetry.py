"""Telemetry of a run: the supervisor samples GPUs and host beside the workers, and writes events.

A trainer of `pantheraml.trainer` does so in its rank 0, which has no supervisor.

A background thread takes a sample a second. Each event summarizes those since the last one: one event a second at
first, one in thirty seconds from the first hour on, so that a day on eight GPUs adds about 3 MB to the stream. The
thread never writes: `tick`, which the supervisor calls while it waits, does.
"""

from __future__ import annotations

import itertools
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import psutil

from pantheraml.base import log
from pantheraml.base.errors import StorageError
from pantheraml.base.events import (
    Emit,
    EventBase,
    GPUHealthChanged,
    GPUIdentity,
    HardwareFound,
    HardwareSampled,
    silent,
)
from pantheraml.devices.background import BackgroundSampler, HostSample
from pantheraml.devices.health import Health, judge_once
from pantheraml.devices.nvml import NoDriverError, Nvml
from pantheraml.devices.probe import cpu_count, visible_gpus
from pantheraml.devices.sampler import GPUSnapshot

logger = log.get(__name__)

FIRST_SECONDS, LAST_SECONDS = 1.0, 30.0
AGE_SHARE = 0.01
"""An interval is this share of the run's age."""


class RunTelemetry:
    """Samples the GPUs of these indices and the host. Use it in a `with` block."""

    def __init__(self, indices: Sequence[int], emit: Emit, *, sampler: BackgroundSampler | None = None) -> None:
        self._emit = emit
        self._indices = tuple(indices)
        self._sampler = sampler or BackgroundSampler(self._indices)
        self._began = self._next = self._until = time.monotonic()
        self._last: HostSample | None = None
        self._health: dict[int, Health] = {}

    def __enter__(self) -> RunTelemetry:
        self._write(_hardware(self._indices))
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._sampler.stop()
        self.flush()

    def _write(self, event: EventBase) -> None:
        try:
            self._emit(event)
        except StorageError as err:  # the workers find it, too, and save what they can
            logger.warning("telemetry is no longer written: %s", err.what)
            self._emit = silent

    def tick(self, now: float | None = None) -> None:
        """Write an event if one is due; cheap otherwise."""
        now = time.monotonic() if now is None else now
        if now < self._next:
            return
        self._next = now + interval(now - self._began)
        self.flush()

    def flush(self) -> None:
        """Write an event with the samples since the last one."""
        samples = self._sampler.samples(after=self._until)
        if samples:
            self._write(summarize(samples, self._last, seconds=samples[-1].clock - self._until))
            self._until, self._last = samples[-1].clock, samples[-1]
        for index, health in sorted(self._sampler.health().items()):
            before = self._health.get(index, Health(status="ok"))
            if health != before and (index in self._health or health.status in ("warn", "fail")):
                self._write(GPUHealthChanged(index=index, status=health.status, reasons=list(health.reasons)))
            self._health[index] = health


def interval(age: float) -> float:
    """Seconds between events of a run of this age."""
    return min(LAST_SECONDS, max(FIRST_SECONDS, AGE_SHARE * age))


def _hardware(indices: Sequence[int]) -> HardwareFound:
    host: dict[str, Any] = {
        "host": platform.node(),
        "cpu_count": cpu_count(),
        "ram_bytes": psutil.virtual_memory().total,
    }
    try:
        session = Nvml()
    except NoDriverError:
        return HardwareFound(driver=None, cuda=None, gpus=[], **host)
    with session:
        gpus = [
            GPUIdentity(
                index=each.index,
                name=each.device.name() or "unknown",
                uuid=each.device.uuid(),
                total_bytes=(each.device.memory() or (None,))[0],
                power_limit_watts=each.gpu.power_limit_watts(),
                health=judge_once(each.gpu).status,
            )
            for each in visible_gpus(session)
            if each.index in indices
        ]
        return HardwareFound(driver=session.driver(), cuda=session.cuda(), gpus=gpus, **host)


def summarize(samples: Sequence[HostSample], before: HostSample | None, *, seconds: float) -> HardwareSampled:
    """Summarize samples in one event; `before`, the one before them, is where their counters began."""
    earlier = () if before is None else before.gpus
    columns: dict[str, Any] = {}
    for position, snapshot in enumerate(samples[-1].gpus):
        taken = [sample.gpus[position] for sample in samples if position < len(sample.gpus)]
        first = earlier[position] if position < len(earlier) else taken[0]
        for name, value in _summary(taken, first).items():
            columns.setdefault(name, []).append(value)
        columns.setdefault("indices", []).append(snapshot.index)
    cpu = [sample.cpu_percent for sample in samples]
    return HardwareSampled(
        seconds=round(seconds, 1),
        samples=len(samples),
        cpu_percent=_mean(cpu, 1),
        ram_bytes=max(sample.ram_used_bytes for sample in samples),
        **columns,
    )


def _summary(taken: Sequence[GPUSnapshot], first: GPUSnapshot) -> dict[str, Any]:
    chain = (first, *taken)
    reasons = [each.event_reasons for each in taken if each.event_reasons is not None]
    return {
        "utilization_percent": _mean((each.utilization_percent for each in taken), 0),
        "memory_bytes": _max(each.used_bytes for each in taken),
        "temperature_celsius": _max(each.temperature_celsius for each in taken),
        "memory_temperature_celsius": _max(each.memory_temperature_celsius for each in taken),
        "power_watts": _mean((each.power_watts for each in taken), 0),
        "sm_clock_mhz": _mean((each.sm_clock_mhz for each in taken), 0),
        "energy_joules": _moved(chain, lambda each: each.energy_joules),
        "nvlink_bytes": _sum(_moved(chain, read) for read in (_nvlink_tx, _nvlink_rx)),
        "pcie_bytes": _sum(_moved(chain, read) for read in (_pcie_tx, _pcie_rx)),
        "event_reasons": list(dict.fromkeys(name for names in reasons for name in names)) if reasons else None,
    }


def _nvlink_tx(snapshot: GPUSnapshot) -> int | None:
    return snapshot.nvlink_tx_bytes


def _nvlink_rx(snapshot: GPUSnapshot) -> int | None:
    return snapshot.nvlink_rx_bytes


def _pcie_tx(snapshot: GPUSnapshot) -> int | None:
    return snapshot.pcie_tx_bytes


def _pcie_rx(snapshot: GPUSnapshot) -> int | None:
    return snapshot.pcie_rx_bytes


def _moved(chain: Sequence[GPUSnapshot], read: Callable[[GPUSnapshot], float | None]) -> float | None:
    """Return the increase of a counter; None if it fell, as when the driver was reloaded."""
    values = [value for each in chain if (value := read(each)) is not None]
    if len(values) < 2 or any(later < earlier for earlier, later in itertools.pairwise(values)):
        return None
    return round(values[-1] - values[0], 1)


def _sum(values: Iterable[float | None]) -> int | None:
    known = [value for value in values if value is not None]
    return int(sum(known)) if known else None


def _mean(values: Iterable[float | None], digits: int) -> float | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean = statistics.fmean(known)
    return round(mean, digits) if digits else round(mean)


def _max(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
