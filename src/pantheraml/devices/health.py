"""Health of a GPU: ok, warn or fail with reasons, from what the driver reports.

| signal | warn | fail |
|---|---|---|
| recovery action that the driver recommends | - | any |
| remapping of memory rows | pending | failed |
| ECC errors since the driver was loaded | corrected ones rising | any uncorrected |
| degrees below the slowdown temperature | <= 5 | <= 0 |
| hardware slowdown | in the last 10 minutes | in 6 of them |
| NVLink | CRC or replay errors | an inactive link beside active ones |
| Xid (critical error) while watched | others | those that need a reset, a reboot or concern NVLink |

A software power cap is normal under load and never a reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pynvml

from pantheraml.devices.nvml import Field, NvmlDevice
from pantheraml.specs.frozen_model import FrozenModel

Status = Literal["ok", "warn", "fail"]

MARGIN_WARN, MARGIN_FAIL = 5, 0
SLOWDOWN_MINUTES, SLOWDOWN_FAIL = 10, 6

SLOWDOWNS = frozenset({"hardware slowdown", "hardware thermal slowdown", "hardware power brake"})

RECOVERY = {
    1: "reset the GPU",
    2: "reboot the node",
    3: "drain its peer-to-peer traffic",
    4: "drain the GPU and reset it",
    5: "recover the IMEX domain",
    6: "reset its bus",
    7: "reboot the system",
}
"""What the driver recommends, by the value of its field."""

APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""Errors of a program, such as an illegal address, which say nothing about the GPU."""
XIDS = {
    **dict.fromkeys((46, 62, 64, 95, 119, 120, 140, 143), "reset the GPU"),
    79: "the GPU is off the bus: reboot the node",
    **dict.fromkeys((74, *range(144, 151)), "NVLink error"),
}
"""Critical errors that make a GPU unusable."""

_FIELDS = (
    pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION,
    pynvml.NVML_FI_DEV_REMAPPED_PENDING,
    pynvml.NVML_FI_DEV_REMAPPED_FAILURE,
    pynvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL,
    pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL,
)
_LINK_ERRORS = (pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY, pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_CRC)
_OLD_LINK_ERRORS = (
    pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
    pynvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
    pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
)
"""Totals on GPUs before Hopper."""


class Health(FrozenModel):
    status: Status | None
    """None: not reported by the driver."""
    reasons: tuple[str, ...] = ()
    """Why it is not ok, most severe first."""


@dataclass(frozen=True)
class HealthReading:
    """The driver's readings at one moment; None: not reported."""

    unusable: str | None = None
    recovery_action: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    thermal_margin: int | None = None
    slowdown: tuple[str, ...] | None = None
    """Reasons of hardware slowdown."""
    links_active: int | None = None
    links_inactive: int | None = None
    link_errors: int | None = None

    @property
    def tells_nothing(self) -> bool:
        return all(value is None for value in vars(self).values())


def read_health(device: NvmlDevice) -> HealthReading:
    """Ask the driver; takes about ten calls, so do it less often than a sample."""
    if (unusable := device.unusable()) is not None:
        return HealthReading(unusable=unusable)
    recovery, pending, failed, corrected, uncorrected = device.fields(_FIELDS)
    reasons, links = device.event_reasons(), device.nvlinks()
    return HealthReading(
        recovery_action=_whole(recovery),
        remap_pending=None if pending is None else bool(pending),
        remap_failed=None if failed is None else bool(failed),
        ecc_corrected=_whole(corrected),
        ecc_uncorrected=_whole(uncorrected),
        thermal_margin=device.thermal_margin(),
        slowdown=None if reasons is None else tuple(name for name in reasons if name in SLOWDOWNS),
        links_active=None if links is None else links.active,
        links_inactive=None if links is None else links.inactive,
        link_errors=None if links is None else _link_errors(device, links.active + links.inactive),
    )


def _link_errors(device: NvmlDevice, links: int) -> int | None:
    scoped: list[Field] = [(field, link) for link in range(links) for field in _LINK_ERRORS]
    known = [value for value in device.fields((*_OLD_LINK_ERRORS, *scoped)) if value is not None]
    return int(sum(known)) if known else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


class HealthWatch:
    """Judges a GPU by its readings over time; one reading is enough for all but what rises."""

    def __init__(self) -> None:
        self._first_corrected: int | None = None
        self._slow_minutes: dict[int, tuple[str, ...]] = {}
        self._xids: dict[int, None] = {}
        self._reading = HealthReading()
        self._minute = 0

    def add(self, reading: HealthReading, *, at: float) -> None:
        """`at`: seconds of any clock that does not jump."""
        self._reading, self._minute = reading, int(at // 60)
        if self._first_corrected is None:
            self._first_corrected = reading.ecc_corrected
        self.saw_reasons(reading.slowdown or (), at=at)

    def saw_reasons(self, reasons: tuple[str, ...], *, at: float) -> None:
        """Note why clocks were lowered between two readings."""
        self._minute = int(at // 60)
        slow = tuple(name for name in reasons if name in SLOWDOWNS)
        if slow:
            self._slow_minutes[self._minute] = slow
        for minute in [each for each in self._slow_minutes if each <= self._minute - SLOWDOWN_MINUTES]:
            del self._slow_minutes[minute]

    def saw_xid(self, number: int) -> None:
        if number not in APPLICATION_XIDS:
            self._xids[number] = None

    def judge(self) -> Health:
        failures, warnings = self._failures(), self._warnings()
        if not failures and not warnings:
            return Health(status=None if self._reading.tells_nothing else "ok")
        return Health(status="fail" if failures else "warn", reasons=(*failures, *warnings))

    def _failures(self) -> list[str]:
        now, found = self._reading, []
        if now.unusable is not None:
            found.append(now.unusable)
        if now.recovery_action:
            action = RECOVERY.get(now.recovery_action, f"recovery action {now.recovery_action}")
            found.append(f"the driver recommends: {action}")
        found += [f"Xid {number}: {XIDS[number]}" for number in self._xids if number in XIDS]
        if now.remap_failed:
            found.append("remapping of a memory row failed: replace the GPU")
        if now.ecc_uncorrected:
            found.append(f"{now.ecc_uncorrected} uncorrected ECC error(s) since the driver was loaded")
        if now.thermal_margin is not None and now.thermal_margin <= MARGIN_FAIL:
            found.append(f"{-now.thermal_margin} °C above its slowdown temperature")
        if len(self._slow_minutes) >= SLOWDOWN_FAIL:
            found.append(f"{self._slow()} in {len(self._slow_minutes)} of the last {SLOWDOWN_MINUTES} minutes")
        if now.links_inactive and now.links_active:  # all are inactive on a GPU that is alone, or has no bridge
            found.append(f"{now.links_inactive} inactive NVLink(s)")
        return found

    def _warnings(self) -> list[str]:
        now, found = self._reading, []
        found += [f"Xid {number}" for number in self._xids if number not in XIDS]
        if now.remap_pending:
            found.append("remapping of a memory row is pending: reset the GPU when it is idle")
        if now.ecc_corrected and self._first_corrected is not None and now.ecc_corrected > self._first_corrected:
            found.append(f"{now.ecc_corrected - self._first_corrected} new corrected ECC error(s)")
        if now.thermal_margin is not None and MARGIN_FAIL < now.thermal_margin <= MARGIN_WARN:
            found.append(f"{now.thermal_margin} °C below its slowdown temperature")
        if 0 < len(self._slow_minutes) < SLOWDOWN_FAIL:
            found.append(self._slow())
        if now.link_errors:
            found.append(f"{now.link_errors} NVLink CRC or replay error(s)")
        return found

    def _slow(self) -> str:
        return " and ".join(dict.fromkeys(name for names in self._slow_minutes.values() for name in names))


def judge_once(device: NvmlDevice) -> Health:
    """Health by a single reading."""
    watch = HealthWatch()
    watch.add(read_health(device), at=0.0)
    return watch.judge()
