"""A fake driver: `FakeNvml` answers the calls of `nvml` for any cluster, as a real host does.

Put it in place of `nvml.binding`. It also fails like a driver: each model lacks calls and fields
(NVML_ERROR_NOT_SUPPORTED), an old one lacks functions, and a GPU can be lost. Made for tests and benchmarks; no command
uses it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

from pantheraml.devices.fake import Cluster, parse_cluster
from pantheraml.devices.nvml import ALL_LINKS

_NAMES = {
    "A100-80": "NVIDIA A100-SXM4-80GB",
    "A100-PCIe-80": "NVIDIA A100 80GB PCIe",
    "H100-80": "NVIDIA H100 80GB HBM3",
    "H200-141": "NVIDIA H200",
    "RTX4090-24": "NVIDIA GeForce RTX 4090",
    "T4-16": "Tesla T4",
}
"""Names that drivers give these models."""

Count = tuple[int, int]


@dataclass
class FakeGPU:
    """State of one GPU; change it while it is watched."""

    name: str
    index: int
    total_bytes: int
    capability: Count
    links: int = 0
    used_bytes: int = 600 * 2**20
    utilization: int = 0
    temperature: int = 34
    slowdown_at: int = 87
    power_watts: float = 76.0
    power_limit_watts: float = 700.0
    sm_clock_mhz: int = 1_980
    reasons: int = 0x1
    energy_mj: int = 1_000_000
    nvlink_kib: Count = (0, 0)
    pcie_bytes: Count = (0, 0)
    ecc: Count = (0, 0)
    """Corrected and uncorrected errors since the driver was loaded."""
    remap: Count = (0, 0)
    """Remapping is pending, has failed."""
    recovery_action: int = 0
    inactive_links: int = 0
    link_errors: int = 0
    lost: int = 0
    """Error code of every call, such as NVML_ERROR_GPU_IS_LOST."""
    processes: list[tuple[int, int]] = field(default_factory=list)
    """Process id and bytes."""
    mig: list[tuple[str, int]] = field(default_factory=list)
    """UUID and bytes of each MIG instance; empty: MIG is off."""
    xids: list[int] = field(default_factory=list)
    """Critical errors that were not read yet."""

    @property
    def data_center(self) -> bool:
        return "GeForce" not in self.name

    @property
    def uuid(self) -> str:
        return f"GPU-{self.index:08x}-0000-4000-8000-00000000fa4e"


@dataclass(frozen=True)
class _MIG:
    gpu: FakeGPU
    uuid: str
    total_bytes: int


class FakeNvml:
    """Functions of `pynvml`, answered from `gpus`; `calls` counts them."""

    def __init__(self, cluster: str | Cluster, *, driver: str = "580.95.05", old: bool = False) -> None:
        """`old`: a driver without the functions that replace those which CUDA 14 removes."""
        described = parse_cluster(cluster) if isinstance(cluster, str) else cluster
        self.cluster, self.driver = described, driver
        self.gpus = [_make(described, index) for index in range(described.gpus_per_node)]
        self.calls: dict[str, int] = {}
        self._missing = _NEW_FUNCTIONS if old else set()
        self._sessions = 0
        self._watched: list[FakeGPU] = []

    def __getattr__(self, name: str) -> Any:
        if name in _FUNCTIONS:
            return lambda *arguments: self._call(name, arguments)
        constant = getattr(pynvml, name)
        if callable(constant):
            raise AttributeError(f"this fake lacks {name}")
        return constant

    def _call(self, name: str, arguments: Sequence[Any]) -> Any:
        self.calls[name] = self.calls.get(name, 0) + 1
        if name in self._missing:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        if name != "nvmlInit" and not self._sessions:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        first = arguments[0] if arguments else None
        lost = first.lost if isinstance(first, FakeGPU) else 0
        if lost:
            raise pynvml.NVMLError(lost)
        answer = _FUNCTIONS[name](self, *arguments)
        if answer is _UNSUPPORTED:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return answer

    def open_session(self) -> None:
        if self.cluster.model is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        self._sessions += 1

    def close_session(self) -> None:
        self._sessions -= 1

    @property
    def open_sessions(self) -> int:
        return self._sessions

    def handle(self, index: int) -> FakeGPU:
        if self.gpus[index].lost:
            raise pynvml.NVMLError(self.gpus[index].lost)
        return self.gpus[index]

    def watch(self, gpu: FakeGPU) -> Any:
        if not gpu.data_center:
            return _UNSUPPORTED
        self._watched.append(gpu)
        return None

    def next_xid(self) -> Any:
        for gpu in self._watched:
            if gpu.xids:
                return SimpleNamespace(device=gpu, eventData=gpu.xids.pop(0))
        raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)


def _make(cluster: Cluster, index: int) -> FakeGPU:
    assert cluster.model is not None
    model = cluster.model
    key = f"{model.name}-{model.nominal_gb}"
    return FakeGPU(
        name=_NAMES.get(key, f"NVIDIA {model.text}"),
        index=index,
        total_bytes=model.memory_bytes,
        capability=model.capability or (0, 0),
        links=0 if not cluster.nvlink else 18 if model.capability and model.capability >= (9, 0) else 12,
        power_limit_watts=float(model.watts or 300),
    )


_UNSUPPORTED = object()

_NEW_FUNCTIONS = {
    "nvmlDeviceGetTemperatureV",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetMarginTemperature",
    "nvmlEventSetWait_v2",
}


def _memory(gpu: FakeGPU | _MIG) -> Any:
    used = gpu.used_bytes if isinstance(gpu, FakeGPU) else 0
    return SimpleNamespace(total=gpu.total_bytes, free=gpu.total_bytes - used, used=used)


def _clock(gpu: FakeGPU, kind: int) -> int:
    return gpu.sm_clock_mhz if kind != pynvml.NVML_CLOCK_MEM else 3_201


def _link_state(gpu: FakeGPU, link: int) -> Any:
    return int(link >= gpu.inactive_links) if gpu.links else _UNSUPPORTED


def _margin(gpu: FakeGPU) -> Any:
    return gpu.slowdown_at - gpu.temperature if gpu.capability >= (9, 0) else _UNSUPPORTED


def _threshold(gpu: FakeGPU, kind: int) -> Any:
    return gpu.slowdown_at if kind == pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN else _UNSUPPORTED


def _p2p(gpu: FakeGPU, other: FakeGPU, kind: int) -> int:
    linked = kind == pynvml.NVML_P2P_CAPS_INDEX_NVLINK and gpu.links and other.links
    return int(pynvml.NVML_P2P_STATUS_OK if linked else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED)


def _ancestor(gpu: FakeGPU, other: FakeGPU) -> int:
    """Pairs share a PCIe switch, halves of eight a CPU socket."""
    if gpu.index // 2 == other.index // 2:
        return int(pynvml.NVML_TOPOLOGY_SINGLE)
    return int(pynvml.NVML_TOPOLOGY_NODE if gpu.index // 4 == other.index // 4 else pynvml.NVML_TOPOLOGY_SYSTEM)


def _field_numbers(gpu: FakeGPU) -> dict[int, int]:
    """Fields that do not depend on a link."""
    known = {
        pynvml.NVML_FI_DEV_POWER_INSTANT: int(gpu.power_watts * 1000),
        pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION: gpu.energy_mj,
        pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES: gpu.pcie_bytes[0],
        pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES: gpu.pcie_bytes[1],
        pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: gpu.recovery_action,
    }
    if gpu.data_center:
        names = ("ECC_SBE_VOL_TOTAL", "ECC_DBE_VOL_TOTAL", "REMAPPED_PENDING", "REMAPPED_FAILURE", "MEMORY_TEMP")
        values = (*gpu.ecc, *gpu.remap, gpu.temperature + 6)
        known |= {getattr(pynvml, f"NVML_FI_DEV_{name}"): value for name, value in zip(names, values, strict=True)}
    if gpu.links:
        known[pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT] = gpu.links
    return known


def _field(gpu: FakeGPU, number: int, scope: int) -> int | None:
    throughput = (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
    if gpu.links and number in throughput:
        moved = gpu.nvlink_kib[throughput.index(number)]
        return moved if scope == ALL_LINKS else moved // gpu.links
    if gpu.links and number in (pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY, pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_CRC):
        return gpu.link_errors if scope == 0 else 0
    return _field_numbers(gpu).get(number)


def _fields(gpu: FakeGPU, wanted: Sequence[Count]) -> list[Any]:
    values = (pynvml.c_nvmlFieldValue_t * len(wanted))()
    for value, (number, scope) in zip(values, wanted, strict=True):
        answer = _field(gpu, number, scope)
        value.fieldId, value.scopeId = number, scope
        value.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED if answer is None else pynvml.NVML_SUCCESS
        value.valueType = 3  # unsigned long long
        value.value.ullVal = answer or 0
    return list(values)


def _data_center(answer: Callable[[FakeGPU], Any]) -> Callable[[FakeNvml, FakeGPU], Any]:
    """A call that GeForce cards do not support."""
    return lambda _, gpu: answer(gpu) if gpu.data_center else _UNSUPPORTED


_ids = itertools.count(1)

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "nvmlInit": lambda self: self.open_session(),
    "nvmlShutdown": lambda self: self.close_session(),
    "nvmlSystemGetDriverVersion": lambda self: self.driver,
    "nvmlSystemGetCudaDriverVersion_v2": lambda self: 13_000,
    "nvmlDeviceGetCount": lambda self: len(self.gpus),
    "nvmlDeviceGetHandleByIndex": lambda self, index: self.handle(index),
    "nvmlDeviceGetName": lambda self, gpu: gpu.name if isinstance(gpu, FakeGPU) else f"{gpu.gpu.name} MIG",
    "nvmlDeviceGetUUID": lambda self, gpu: gpu.uuid,
    "nvmlDeviceGetCudaComputeCapability": lambda self, gpu: (
        gpu.capability if isinstance(gpu, FakeGPU) else gpu.gpu.capability
    ),
    "nvmlDeviceGetMemoryInfo": lambda self, gpu: _memory(gpu),
    "nvmlDeviceGetUtilizationRates": lambda self, gpu: (
        SimpleNamespace(gpu=gpu.utilization, memory=gpu.utilization // 2)
        if isinstance(gpu, FakeGPU) and not gpu.mig
        else _UNSUPPORTED
    ),
    "nvmlDeviceGetTemperatureV": lambda self, gpu, sensor: gpu.temperature,
    "nvmlDeviceGetTemperature": lambda self, gpu, sensor: gpu.temperature,
    "nvmlDeviceGetMarginTemperature": lambda self, gpu: _margin(gpu),
    "nvmlDeviceGetTemperatureThreshold": lambda self, gpu, kind: _threshold(gpu, kind),
    "nvmlDeviceGetPowerUsage": lambda self, gpu: int(gpu.power_watts * 1000),
    "nvmlDeviceGetEnforcedPowerLimit": lambda self, gpu: int(gpu.power_limit_watts * 1000),
    "nvmlDeviceGetClockInfo": lambda self, gpu, kind: _clock(gpu, kind),
    "nvmlDeviceGetMaxClockInfo": lambda self, gpu, kind: 1_980 if kind != pynvml.NVML_CLOCK_MEM else 3_201,
    "nvmlDeviceGetCurrentClocksEventReasons": lambda self, gpu: gpu.reasons,
    "nvmlDeviceGetCurrentClocksThrottleReasons": lambda self, gpu: gpu.reasons,
    "nvmlDeviceGetFieldValues": lambda self, gpu, wanted: _fields(gpu, wanted),
    "nvmlDeviceGetEccMode": _data_center(lambda gpu: [1, 1]),
    "nvmlDeviceGetMigMode": _data_center(lambda gpu: [int(bool(gpu.mig)), int(bool(gpu.mig))]),
    "nvmlDeviceGetMaxMigDeviceCount": lambda self, gpu: 7,
    "nvmlDeviceGetMigDeviceHandleByIndex": lambda self, gpu, index: (
        _MIG(gpu, *gpu.mig[index]) if index < len(gpu.mig) else _UNSUPPORTED
    ),
    "nvmlDeviceGetPciInfo": lambda self, gpu: SimpleNamespace(busId=f"00000000:{16 + gpu.index:02X}:00.0"),
    "nvmlDeviceGetMaxPcieLinkGeneration": lambda self, gpu: 5 if gpu.capability >= (9, 0) else 4,
    "nvmlDeviceGetMaxPcieLinkWidth": lambda self, gpu: 16,
    "nvmlDeviceGetMemoryAffinity": lambda self, gpu, size, scope: [1 << (gpu.index // 4)],
    "nvmlDeviceGetComputeRunningProcesses": lambda self, gpu: [
        SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in getattr(gpu, "processes", ())
    ],
    "nvmlDeviceGetNvLinkState": lambda self, gpu, link: _link_state(gpu, link),
    "nvmlDeviceGetP2PStatus": lambda self, gpu, other, kind: _p2p(gpu, other, kind),
    "nvmlDeviceGetTopologyCommonAncestor": lambda self, gpu, other: _ancestor(gpu, other),
    "nvmlEventSetCreate": lambda self: next(_ids),
    "nvmlDeviceRegisterEvents": lambda self, gpu, kinds, events: self.watch(gpu),
    "nvmlEventSetWait_v2": lambda self, events, timeout: self.next_xid(),
    "nvmlEventSetWait": lambda self, events, timeout: self.next_xid(),
    "nvmlEventSetFree": lambda self, events: None,
}
