"""Readings of the GPUs through NVML, one snapshot per GPU. Never imports torch.

Cheap enough to call at every step: NVML is initialized once, which takes far longer than a query. What a GPU does not
support is asked once, and None from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pynvml

from pantheraml.devices.nvml import ALL_LINKS, Field, NoDriverError, Nvml, NvmlDevice
from pantheraml.devices.probe import VisibleGPU, visible_gpus

_KIB = 1024

# PCIe: counters of bytes. nvmlDeviceGetPcieThroughput would block for 20 ms per direction.
_FIELDS: dict[str, Field] = {
    "power_mw": pynvml.NVML_FI_DEV_POWER_INSTANT,
    "memory_temperature": pynvml.NVML_FI_DEV_MEMORY_TEMP,
    "energy_mj": pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION,
    "nvlink_tx_kib": (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ALL_LINKS),
    "nvlink_rx_kib": (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ALL_LINKS),
    "pcie_tx": pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES,
    "pcie_rx": pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES,
}


@dataclass(frozen=True, kw_only=True)
class GPUSnapshot:
    """Driver readings of one GPU at one moment; None: not supported, or not asked for."""

    index: int = 0
    total_bytes: int | None
    free_bytes: int | None
    """Memory not used by any process."""
    utilization_percent: int | None
    """Share of the last sampling period in which a kernel was running."""
    temperature_celsius: int | None = None
    memory_temperature_celsius: int | None = None
    power_watts: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    event_reasons: tuple[str, ...] | None = None
    """Why clocks are below their maximum."""
    energy_joules: float | None = None
    """Counter since the driver was loaded, as are the bytes below."""
    nvlink_tx_bytes: int | None = None
    nvlink_rx_bytes: int | None = None
    pcie_tx_bytes: int | None = None
    pcie_rx_bytes: int | None = None

    @property
    def used_bytes(self) -> int | None:
        if self.total_bytes is None or self.free_bytes is None:
            return None
        return self.total_bytes - self.free_bytes

    @property
    def memory_percent(self) -> float | None:
        used = self.used_bytes
        return None if used is None or not self.total_bytes else 100 * used / self.total_bytes


class GPUSampler:
    """Reads GPUs again and again; close it when done."""

    def __init__(self, indices: Sequence[int] | None = None) -> None:
        """`indices`: GPUs to read; None: all visible ones. Without a driver there are none."""
        self.session: Nvml | None = None
        self.visible: list[VisibleGPU] = []
        try:
            self.session = Nvml()
        except NoDriverError as err:
            self.note: str | None = str(err)
        else:
            self.note = None
            found = visible_gpus(self.session)
            self.visible = found if indices is None else [each for each in found if each.index in indices]
        self._fields = [dict(_FIELDS) for _ in self.visible]

    def close(self) -> None:
        if self.session is not None:
            self.session.close()
        self.session, self.visible = None, []

    def take(self, *, everything: bool = False) -> list[GPUSnapshot]:
        """Return one snapshot per GPU, in CUDA's order: memory and utilization, or `everything`."""
        return [
            self._everything(each, fields) if everything else self._basics(each)
            for each, fields in zip(self.visible, self._fields, strict=True)
        ]

    def _basics(self, visible: VisibleGPU) -> GPUSnapshot:
        memory = visible.device.memory() or (None, None)
        return GPUSnapshot(
            index=visible.index,
            total_bytes=memory[0],
            free_bytes=memory[1],
            utilization_percent=visible.device.utilization(),
        )

    def _everything(self, visible: VisibleGPU, fields: dict[str, Field]) -> GPUSnapshot:
        gpu: NvmlDevice = visible.gpu  # a MIG instance has memory of its own; clocks and power are the GPU's
        values = dict(zip(fields, gpu.fields(tuple(fields.values())), strict=True))
        read = {name: value for name, value in values.items() if value is not None}
        if read:  # a GPU that does not answer at all is lost, for now
            for name in values.keys() - read.keys():
                del fields[name]
        power = read.get("power_mw")
        energy = read.get("energy_mj")
        return GPUSnapshot(
            **vars(self._basics(visible))
            | {
                "temperature_celsius": gpu.temperature(),
                "memory_temperature_celsius": _whole(read.get("memory_temperature")),
                "power_watts": gpu.power_watts() if power is None else power / 1000,
                "sm_clock_mhz": gpu.clock_mhz(pynvml.NVML_CLOCK_SM),
                "memory_clock_mhz": gpu.clock_mhz(pynvml.NVML_CLOCK_MEM),
                "event_reasons": gpu.event_reasons(),
                "energy_joules": None if energy is None else energy / 1000,
                "nvlink_tx_bytes": _whole(read.get("nvlink_tx_kib"), _KIB),
                "nvlink_rx_bytes": _whole(read.get("nvlink_rx_kib"), _KIB),
                "pcie_tx_bytes": _whole(read.get("pcie_tx")),
                "pcie_rx_bytes": _whole(read.get("pcie_rx")),
            }
        )


def _whole(value: float | None, unit: int = 1) -> int | None:
    return None if value is None else int(value) * unit
