"""Devices that jobs can lease: the GPUs of this machine or, without any, slots for CPU processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pantheraml.devices.probe import probe
from pantheraml.specs.plan import DeviceSpec


@dataclass(frozen=True)
class Inventory:
    spec: DeviceSpec
    devices: tuple[str, ...]
    """`gpu:0`, ... or `cpu:0`, ..."""

    @property
    def kind(self) -> str:
        return "GPU" if self.spec.gpus else "CPU slot"

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


def take_inventory(cpu_slots: int | None) -> Inventory:
    spec = probe()
    if spec.gpus:
        return Inventory(spec, tuple(f"gpu:{gpu.index}" for gpu in spec.gpus))
    return Inventory(spec, tuple(f"cpu:{slot}" for slot in range(cpu_slots or spec.cpu_count)))


def gpu_indices(devices: list[str]) -> list[int] | None:
    """Indices of leased GPUs; None for CPU slots."""
    indices = [int(name.partition(":")[2]) for name in devices if name.startswith("gpu:")]
    return indices or None
