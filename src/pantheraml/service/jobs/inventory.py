"""Devices that jobs can lease: the GPUs of this machine or, without any, slots for CPU processes.

With several jobs per GPU, each GPU is leased in shares, such as `gpu:0:1/2`. The name says how many shares there are:
a lease from a time with another number of shares is never taken for one of now.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pantheraml.base import log
from pantheraml.base.errors import ConfigError
from pantheraml.devices.probe import probe
from pantheraml.planner.memory.reserved import CONTEXT_BYTES
from pantheraml.specs.plan import DeviceSpec

logger: logging.Logger = log.get(__name__)

Held = TypeVar("Held")


@dataclass(frozen=True)
class LeasableDevices:
    spec: DeviceSpec
    devices: tuple[str, ...]
    """`gpu:0`, ... or `cpu:0`, ...; with several jobs per GPU the shares: `gpu:0:1/2`, `gpu:0:2/2`, ..."""
    jobs_per_gpu: int = 1

    @property
    def kind(self) -> str:
        return "GPU" if self.spec.gpus else "CPU slot"

    @property
    def cards(self) -> tuple[str, ...]:
        """GPUs or CPU slots: of a GPU's shares, a job gets one at most."""
        return tuple(dict.fromkeys(map(card_of, self.devices)))

    def held(self, leases: Mapping[str, Held]) -> dict[str, Held]:
        """Devices that cannot be leased, with their leases: also those of a GPU that is leased in other shares."""
        others = {card_of(name): lease for name, lease in leases.items() if name not in self.devices}
        return {
            name: leases[name] if name in leases else others[card_of(name)]
            for name in self.devices
            if name in leases or card_of(name) in others
        }

    @property
    def memory_fraction(self) -> float | None:
        """Share of a GPU's memory that torch may use in each job; None: all, as one job has the GPU."""
        if self.jobs_per_gpu == 1:
            return None
        totals = [gpu.total_bytes for gpu in self.spec.gpus if gpu.total_bytes is not None]
        beside = CONTEXT_BYTES / min(totals) if totals else 0.0  # torch does not count what CUDA itself takes
        return 1 / self.jobs_per_gpu - beside

    def cores_of(self, devices: Sequence[str], cores: Sequence[int]) -> list[int] | None:
        """Cores of CPU slots, of which each has an equal share of `cores`; None for GPUs, whose jobs share all."""
        if self.spec.gpus:
            return None
        slots, found = len(self.devices), set()
        for name in devices:
            slot = int(name.partition(":")[2])
            first, end = slot * len(cores) // slots, (slot + 1) * len(cores) // slots
            found |= {*cores[first : max(end, first + 1)]}
        return sorted(found)


def take_inventory(cpu_slots: int | None, jobs_per_gpu: int = 1) -> LeasableDevices:
    """ConfigError if a GPU is too small for so many jobs."""
    spec = probe()
    if not spec.gpus:
        if jobs_per_gpu > 1:
            logger.warning("--jobs-per-gpu has no effect: this machine has no GPU, and jobs get CPU slots")
        return LeasableDevices(spec, tuple(f"cpu:{slot}" for slot in range(cpu_slots or spec.cpu_count)))
    if cpu_slots is not None:
        logger.warning("--cpu-slots has no effect: jobs get the GPUs of this machine")
    cards = [f"gpu:{gpu.index}" for gpu in spec.gpus]
    if jobs_per_gpu == 1:
        return LeasableDevices(spec, tuple(cards))
    found = LeasableDevices(
        spec,
        tuple(f"{card}:{share}/{jobs_per_gpu}" for card in cards for share in range(1, jobs_per_gpu + 1)),
        jobs_per_gpu,
    )
    if (found.memory_fraction or 0.0) <= 0.0:
        raise ConfigError(
            f"The memory of a GPU is too small for {jobs_per_gpu} jobs: each needs {CONTEXT_BYTES >> 20} MiB for CUDA"
            " alone.",
            fix="Choose a smaller --jobs-per-gpu.",
        )
    return found


@functools.lru_cache(1024)
def card_of(name: str) -> str:
    """Return the GPU of a share: `gpu:0` of `gpu:0:1/2`. Other devices are returned as they are."""
    return ":".join(name.split(":")[:2])


def share_of(devices: Sequence[str] | None) -> float:
    """Return the part of each of its devices that a job has leased, from 0 to 1."""
    return 1.0 / int(devices[0].rpartition("/")[2]) if devices and "/" in devices[0] else 1.0


def gpu_indices(devices: Iterable[str]) -> list[int] | None:
    """Indices of leased GPUs; None for CPU slots."""
    indices = [int(name.split(":")[1]) for name in devices if name.startswith("gpu:")]
    return indices or None
