"""Watch GPUs from a script or service: what they are, which are available, how busy they were during a block.

    monitor = GPUMonitor(GPUConfig(memory_fraction=0.8))
    monitor.log_gpu_stats("before training")
    with gpu_monitoring_context([0, 1]) as usage:
        train()
    print(usage.gpus[0].utilization_percent)

Values that the driver does not report are None. Nothing here imports torch or uses a GPU.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pantheraml.base import log
from pantheraml.base.errors import DeviceError
from pantheraml.base.text import printable
from pantheraml.devices.background import BackgroundSampler, HostSample, take_once
from pantheraml.devices.inventory import GPUDetails, Inventory, take_inventory
from pantheraml.devices.sampler import GPUSnapshot
from pantheraml.devices.select import Selection, fit_here
from pantheraml.specs.gpu_config import GPUConfig

__all__ = ["GPUConfig", "GPUMonitor", "GPUUsage", "Usage", "gpu_monitoring_context", "performance_context"]

logger = log.get(__name__)

GIB = 2**30


class GPUMonitor:
    def __init__(self, gpu_config: GPUConfig | None = None) -> None:
        self._config = gpu_config or GPUConfig()
        log.start_for_scripts()

    def get_gpu_info(self) -> list[dict[str, Any]]:
        """Identity, memory, links, health and processes of the configured GPUs; empty without any."""
        inventory = take_inventory()
        if inventory.note is not None:
            logger.info("no GPU is available: %s", inventory.note)
        return [_info(gpu) for gpu in self._configured(inventory)]

    def get_available_gpus(self) -> list[int]:
        """Indices of the configured GPUs that are healthy and have `memory_fraction` of their memory free."""
        selection = self.select_gpus()
        logger.info("available GPUs: %s: %s", list(selection.indices) or "none", selection.reason)
        return list(selection.indices)

    def select_gpus(self) -> Selection:
        """The available GPUs with the reason, and why others are not."""
        found = fit_here(free_share=self._config.memory_fraction, among=self._config.gpu_ids or None)
        if self._config.use_multi_gpu or len(found.indices) < 2:
            return found
        first, *rest = found.indices
        passed = found.passed_over | dict.fromkeys(rest, "use_multi_gpu is False")
        return Selection((first,), "use_multi_gpu is False", passed)

    def monitor_gpu_usage(self, gpu_id: int = 0) -> dict[str, Any]:
        """Load of one GPU now: percentages, °C, W and bytes. DeviceError if it is not visible."""
        sample = take_once((gpu_id,))
        snapshot = next((gpu for gpu in sample.gpus if gpu.index == gpu_id), None)
        if snapshot is None:
            inventory = take_inventory()
            known = inventory.note or f"visible are {[gpu.index for gpu in inventory.gpus]}"
            raise DeviceError(f"There is no GPU {gpu_id}: {known}.", fix="`pantheraml gpus` lists the GPUs.")
        return _usage(snapshot)

    def log_gpu_stats(self, text: str = "") -> None:
        """Log one line per configured GPU, or one for the host if there is none."""
        sample = take_once(tuple(self._config.gpu_ids) or None)
        prefix = f"{printable(text)}: " if text else ""
        if not sample.gpus:
            logger.info("%sno GPU; %s", prefix, _host(sample))
        for gpu in sample.gpus:
            logger.info("%sGPU %d: %s", prefix, gpu.index, _line(_usage(gpu)))

    def _configured(self, inventory: Inventory) -> list[GPUDetails]:
        wanted = self._config.gpu_ids
        if missing := sorted(set(wanted) - {gpu.index for gpu in inventory.gpus}):
            known = inventory.note or f"visible are {[gpu.index for gpu in inventory.gpus]}"
            raise DeviceError(f"There is no GPU {missing[0]}: {known}.", fix="Correct gpu_ids.")
        return [gpu for gpu in inventory.gpus if not wanted or gpu.index in wanted]


@dataclass(frozen=True)
class GPUUsage:
    """One GPU over a block of code; None: not known."""

    index: int
    utilization_percent: float | None
    """Mean."""
    memory_bytes: int | None
    """Highest, by all processes."""
    temperature_celsius: int | None
    """Highest."""
    power_watts: float | None
    """Mean."""
    energy_joules: float | None


@dataclass
class Usage:
    """Usage during a block of code; filled when the block ends."""

    name: str = ""
    seconds: float = 0.0
    cpu_percent: float | None = None
    """Mean CPU use of all cores of the host; None for a block of less than two samples."""
    gpus: dict[int, GPUUsage] = field(default_factory=dict)
    """Usage by GPU index."""


@contextlib.contextmanager
def gpu_monitoring_context(gpu_ids: Sequence[int] | None = None) -> Iterator[Usage]:
    """Sample GPUs once a second while the block runs, and log how busy they were; None: all visible ones.

    A warning names GPUs that do not exist.
    """
    with _measured("GPU monitoring", gpu_ids) as usage:
        yield usage


@contextlib.asynccontextmanager
async def performance_context(name: str) -> AsyncIterator[Usage]:
    """Measure an asynchronous block: its time, and the load of CPUs and GPUs; logged under `name`."""
    with _measured(name, None) as usage:
        yield usage


@contextlib.contextmanager
def _measured(name: str, gpu_ids: Sequence[int] | None) -> Iterator[Usage]:
    log.start_for_scripts()
    usage, began = Usage(name), time.monotonic()
    first = take_once(gpu_ids)
    missing = sorted(set(gpu_ids or ()) - {gpu.index for gpu in first.gpus})
    if missing:
        logger.warning("GPU %s cannot be monitored: not visible here", ", ".join(map(str, missing)))
    sampler = BackgroundSampler(None if gpu_ids is None else tuple(gpu_ids))
    try:
        with sampler:
            yield usage
    finally:
        usage.seconds = time.monotonic() - began
        # first and last are taken here, so that a block of any length has two readings
        _fill(usage, [first, *sampler.samples(), take_once(gpu_ids)])
        _report(usage)


def _fill(usage: Usage, samples: Sequence[HostSample]) -> None:
    usage.cpu_percent = _mean([sample.cpu_percent for sample in samples])
    for snapshot in samples[-1].gpus:
        taken = [gpu for sample in samples for gpu in sample.gpus if gpu.index == snapshot.index]
        energy = [gpu.energy_joules for gpu in taken if gpu.energy_joules is not None]
        usage.gpus[snapshot.index] = GPUUsage(
            index=snapshot.index,
            utilization_percent=_mean([gpu.utilization_percent for gpu in taken]),
            memory_bytes=_highest([gpu.used_bytes for gpu in taken]),
            temperature_celsius=_highest([gpu.temperature_celsius for gpu in taken]),
            power_watts=_mean([gpu.power_watts for gpu in taken]),
            energy_joules=energy[-1] - energy[0] if len(energy) > 1 and energy[-1] >= energy[0] else None,
        )


def _report(usage: Usage) -> None:
    busy = "" if usage.cpu_percent is None else f", CPU {usage.cpu_percent:.0f} % busy"
    logger.info("%s: %.3g s%s", printable(usage.name), usage.seconds, busy)
    for index, gpu in usage.gpus.items():
        memory = None if gpu.memory_bytes is None else gpu.memory_bytes / GIB
        parts = (
            _part("load", gpu.utilization_percent, "%"),
            _part("memory", memory, "GiB"),
            _part("at most", gpu.temperature_celsius, "°C"),
            _part("power", gpu.power_watts, "W"),
            _part("energy", gpu.energy_joules, "J"),
        )
        logger.info("%s: GPU %d: %s", printable(usage.name), index, ", ".join(part for part in parts if part))


def _info(gpu: GPUDetails) -> dict[str, Any]:
    values = gpu.model_dump(mode="json", exclude={"health", "index"})
    used = None if gpu.total_bytes is None or gpu.free_bytes is None else gpu.total_bytes - gpu.free_bytes
    health = {"health": gpu.health.status, "health_reasons": list(gpu.health.reasons)}
    return {"id": gpu.index, **values, "used_bytes": used, **health}


def _usage(gpu: GPUSnapshot) -> dict[str, Any]:
    return {
        "gpu_id": gpu.index,
        "gpu_utilization": None if gpu.utilization_percent is None else float(gpu.utilization_percent),
        "memory_utilization": gpu.memory_percent,
        "memory_used_bytes": gpu.used_bytes,
        "memory_total_bytes": gpu.total_bytes,
        "temperature": gpu.temperature_celsius,
        "power": gpu.power_watts,
        "energy_joules": gpu.energy_joules,
        "sm_clock_mhz": gpu.sm_clock_mhz,
        "event_reasons": None if gpu.event_reasons is None else list(gpu.event_reasons),
    }


def _line(usage: dict[str, Any]) -> str:
    parts = (
        _part("load", usage["gpu_utilization"], "%"),
        _part("memory", usage["memory_utilization"], "%"),
        _part("", usage["temperature"], "°C"),
        _part("", usage["power"], "W"),
    )
    return ", ".join(part for part in parts if part) or "the driver reports nothing"


def _part(name: str, value: float | None, unit: str) -> str:
    return "" if value is None else f"{name} {value:,.0f} {unit}".strip()


def _host(sample: HostSample) -> str:
    return f"RAM {sample.ram_used_bytes / GIB:.1f} of {sample.ram_total_bytes / GIB:.1f} GiB in use"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _highest(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
