"""The only place that calls NVML, NVIDIA's management library: one open session, and one class per GPU handle.

Methods return plain values, and None for what the driver does not report: that a GPU, driver or binding lacks a call is
normal. Calls that CUDA 14 removes are the second choice, for older drivers. Tests replace `binding` by a `FakeNvml`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import pynvml

binding: Any = pynvml
"""The module whose functions are called."""

ALL_LINKS = 0xFFFFFFFF
"""Scope of a field that sums over all NVLinks; without it, counters are those of link 0."""

Field = int | tuple[int, int]
"""A field id, or one with its scope (an NVLink)."""

# A newer function of the same purpose exists, or this one does not: try the next.
_TRY_NEXT = {
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    pynvml.NVML_ERROR_DEPRECATED,
}

_UNUSABLE = {
    pynvml.NVML_ERROR_GPU_IS_LOST: "the driver has lost the GPU",
    pynvml.NVML_ERROR_RESET_REQUIRED: "the GPU requires a reset",
}

# Members of the union of a field's value, by type.
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")

# With 32 bits, a counter of bytes starts again ten times a second on PCIe 5: what moved cannot be known.
_BYTE_COUNTERS = {pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES}
_WIDE_TYPES = {pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG}

EVENT_REASONS = {
    "idle": 0x1,
    "application clocks": 0x2,
    "software power cap": 0x4,
    "hardware slowdown": 0x8,
    "sync boost": 0x10,
    "software thermal slowdown": 0x20,
    "hardware thermal slowdown": 0x40,
    "hardware power brake": 0x80,
    "display clocks": 0x100,
}
"""Names of the bits that say why clocks are below their maximum."""

LEVELS = {
    0: "same board",
    10: "PCIe switch",
    20: "several PCIe switches",
    30: "host bridge",
    40: "NUMA node",
    50: "CPU interconnect",
}
"""The closest common ancestor of two GPUs on PCIe, by the driver's level."""


class NoDriverError(Exception):
    """NVML cannot be used here; the message says why."""


@dataclass(frozen=True)
class ProcessOnGPU:
    pid: int
    memory_bytes: int | None


@dataclass(frozen=True)
class LinkState:
    """NVLinks of a GPU."""

    active: int
    inactive: int


class Nvml:
    """An NVML session. Opening it takes 20 ms or more, a query far less, so keep it open while sampling."""

    def __init__(self) -> None:
        """Raises NoDriverError."""
        self._binding = binding
        try:
            self._binding.nvmlInit()
        except pynvml.NVMLError as err:
            raise NoDriverError(f"no NVIDIA driver: {err}") from err

    def close(self) -> None:
        self._ask("nvmlShutdown")

    def __enter__(self) -> Nvml:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def devices(self) -> list[NvmlDevice]:
        """Return all GPUs of this host by index, also those that the driver has lost."""
        return [NvmlDevice(self, *self._handle(index)) for index in range(int(self._ask("nvmlDeviceGetCount") or 0))]

    def _handle(self, index: int) -> tuple[Any, str | None]:
        try:
            return self._binding.nvmlDeviceGetHandleByIndex(index), None
        except pynvml.NVMLError as err:
            return None, _UNUSABLE.get(err.value, f"NVML cannot open the GPU: {err}")

    def driver(self) -> str | None:
        return _text(self._ask("nvmlSystemGetDriverVersion"))

    def cuda(self) -> str | None:
        """Newest CUDA version that the driver supports, such as 13.0."""
        number = self._ask("nvmlSystemGetCudaDriverVersion_v2")
        return None if number is None else f"{number // 1000}.{number % 1000 // 10}"

    def watch_xids(self, devices: Sequence[NvmlDevice]) -> XidWatch | None:
        """Collect critical errors (Xids) of `devices` from now on; None: not supported here."""
        events = self._ask("nvmlEventSetCreate")
        if events is None:
            return None
        kind = self._binding.nvmlEventTypeXidCriticalError
        watched = {}
        for device in devices:
            # returns None on success, so only its error tells
            if device.handle is not None and not self.fails("nvmlDeviceRegisterEvents", device.handle, kind, events):
                watched[device.uuid()] = device
        if watched:
            return XidWatch(self, events, watched)
        self._ask("nvmlEventSetFree", events)
        return None

    def fails(self, name: str, *arguments: Any) -> bool:
        try:
            getattr(self._binding, name)(*arguments)
        except (pynvml.NVMLError, AttributeError):
            return True
        return False

    def _ask(self, *names_and_arguments: Any) -> Any:
        return self.ask((names_and_arguments[0],), *names_and_arguments[1:])

    def ask(self, names: Sequence[str], *arguments: Any) -> Any:
        """Return the result of the first of `names` that binding and driver have; None if it fails."""
        for name in names:
            call = getattr(self._binding, name, None)  # bindings of other versions lack some
            if call is None:
                continue
            try:
                return call(*arguments)
            except pynvml.NVMLError as err:
                if err.value not in _TRY_NEXT:
                    return None
        return None


class NvmlDevice:
    """One GPU, or one MIG instance of a GPU."""

    def __init__(self, session: Nvml, handle: Any, unusable: str | None = None) -> None:
        self._session = session
        self.handle = handle
        self._unusable = unusable

    def _ask(self, *names: str, arguments: tuple[Any, ...] = ()) -> Any:
        return None if self.handle is None else self._session.ask(names, self.handle, *arguments)

    def unusable(self) -> str | None:
        """Why the GPU cannot be used at all; None: it answers."""
        if self.handle is None:
            return self._unusable
        try:
            self._session._binding.nvmlDeviceGetMemoryInfo(self.handle)
        except pynvml.NVMLError as err:
            return _UNUSABLE.get(err.value)
        return None

    def name(self) -> str | None:
        return _text(self._ask("nvmlDeviceGetName"))

    def uuid(self) -> str | None:
        return _text(self._ask("nvmlDeviceGetUUID"))

    def capability(self) -> tuple[int, int] | None:
        found = self._ask("nvmlDeviceGetCudaComputeCapability")
        return None if found is None else (int(found[0]), int(found[1]))

    def memory(self) -> tuple[int, int] | None:
        """Total and free bytes."""
        found = self._ask("nvmlDeviceGetMemoryInfo")
        return None if found is None else (int(found.total), int(found.free))

    def utilization(self) -> int | None:
        found = self._ask("nvmlDeviceGetUtilizationRates")
        return None if found is None else int(found.gpu)

    def temperature(self) -> int | None:
        sensor = (pynvml.NVML_TEMPERATURE_GPU,)
        return _whole(self._ask("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature", arguments=sensor))

    def thermal_margin(self) -> int | None:
        """Degrees below the temperature at which the GPU slows down; older GPUs report that temperature instead."""
        margin = self._ask("nvmlDeviceGetMarginTemperature")
        if margin is not None:
            return int(margin)
        temperature = self.temperature()
        for threshold in (pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN, pynvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX):
            limit = self._ask("nvmlDeviceGetTemperatureThreshold", arguments=(threshold,))
            if limit is not None and temperature is not None:
                return int(limit) - temperature
        return None

    def power_watts(self) -> float | None:
        """Power now, for drivers that lack the field `POWER_INSTANT`."""
        milliwatts = self._ask("nvmlDeviceGetPowerUsage")
        return None if milliwatts is None else milliwatts / 1000

    def power_limit_watts(self) -> float | None:
        milliwatts = self._ask("nvmlDeviceGetEnforcedPowerLimit")
        return None if milliwatts is None else milliwatts / 1000

    def clock_mhz(self, kind: int) -> int | None:
        return _whole(self._ask("nvmlDeviceGetClockInfo", arguments=(kind,)))

    def max_clock_mhz(self, kind: int) -> int | None:
        return _whole(self._ask("nvmlDeviceGetMaxClockInfo", arguments=(kind,)))

    def event_reasons(self) -> tuple[str, ...] | None:
        """Why clocks are below their maximum."""
        bits = self._ask("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
        return None if bits is None else tuple(name for name, bit in EVENT_REASONS.items() if bits & bit)

    def fields(self, fields: Sequence[Field]) -> list[int | float | None]:
        """Read several fields in one call; None for each that is not supported."""
        scoped = [field if isinstance(field, tuple) else (field, 0) for field in fields]
        values = self._ask("nvmlDeviceGetFieldValues", arguments=(scoped,))
        return [None] * len(fields) if values is None else [_field_value(value) for value in values]

    def ecc_enabled(self) -> bool | None:
        modes = self._ask("nvmlDeviceGetEccMode")
        return None if modes is None else bool(modes[0])

    def mig_enabled(self) -> bool | None:
        modes = self._ask("nvmlDeviceGetMigMode")
        return None if modes is None else bool(modes[0])

    def mig_instances(self) -> list[NvmlDevice]:
        handles = (
            self._ask("nvmlDeviceGetMigDeviceHandleByIndex", arguments=(index,))
            for index in range(int(self._ask("nvmlDeviceGetMaxMigDeviceCount") or 0))
        )
        return [NvmlDevice(self._session, handle) for handle in handles if handle is not None]

    def pci_bus_id(self) -> str | None:
        info = self._ask("nvmlDeviceGetPciInfo")
        return None if info is None else _text(info.busId)

    def pcie(self) -> tuple[int, int] | None:
        """Generation and lanes that GPU and slot support together; an idle GPU runs at less."""
        generation, width = self._ask("nvmlDeviceGetMaxPcieLinkGeneration"), self._ask("nvmlDeviceGetMaxPcieLinkWidth")
        return None if generation is None or width is None else (int(generation), int(width))

    def numa_node(self) -> int | None:
        """NUMA node of the host that is closest to the GPU."""
        masks = self._ask("nvmlDeviceGetMemoryAffinity", arguments=(1, pynvml.NVML_AFFINITY_SCOPE_NODE))
        if masks is None or not masks[0]:
            return None
        return (int(masks[0]) & -int(masks[0])).bit_length() - 1

    def processes(self) -> list[ProcessOnGPU] | None:
        found = self._ask("nvmlDeviceGetComputeRunningProcesses")
        return None if found is None else [ProcessOnGPU(int(each.pid), _whole(each.usedGpuMemory)) for each in found]

    def nvlinks(self) -> LinkState | None:
        """Return the state of all NVLinks; None: the GPU has none, or does not report it."""
        (count,) = self.fields((pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT,))
        if not count:
            return None
        states = [self._ask("nvmlDeviceGetNvLinkState", arguments=(link,)) for link in range(int(count))]
        known = [state for state in states if state is not None]
        return LinkState(sum(map(bool, known)), sum(not state for state in known)) if known else None

    def connection(self, other: NvmlDevice) -> str | None:
        """How two GPUs reach each other: NVLink, or their closest common ancestor on PCIe (`LEVELS`)."""
        if other.handle is None:
            return None
        status = self._ask("nvmlDeviceGetP2PStatus", arguments=(other.handle, pynvml.NVML_P2P_CAPS_INDEX_NVLINK))
        if status == pynvml.NVML_P2P_STATUS_OK:
            return "NVLink"
        return LEVELS.get(self._ask("nvmlDeviceGetTopologyCommonAncestor", arguments=(other.handle,)))


class XidWatch:
    """Critical errors since it was opened. NVML keeps no history, so earlier ones are not seen."""

    def __init__(self, session: Nvml, events: Any, devices: dict[str | None, NvmlDevice]) -> None:
        self._session, self._events, self._devices = session, events, devices

    def poll(self) -> Iterator[tuple[str, int]]:
        """Yield UUID and Xid of each new error."""
        while (data := self._session.ask(("nvmlEventSetWait_v2", "nvmlEventSetWait"), self._events, 0)) is not None:
            uuid = NvmlDevice(self._session, data.device).uuid()
            if uuid is not None:
                yield uuid, int(data.eventData)

    def close(self) -> None:
        self._session.ask(("nvmlEventSetFree",), self._events)


def _field_value(value: Any) -> int | float | None:
    if value.fieldId in _BYTE_COUNTERS and value.valueType not in _WIDE_TYPES:
        return None
    if value.nvmlReturn != pynvml.NVML_SUCCESS or not 0 <= value.valueType < len(_MEMBERS):
        return None
    found: int | float = getattr(value.value, _MEMBERS[value.valueType])
    return found


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value
