"""Which waiting jobs start now, on which devices, and why the others wait: a pure function.

Order: priority, which grows with waiting; then the user who has used the least device time lately; then who came first.
The first job that does not fit reserves the devices it needs: later ones go ahead only if they end before these are
free, by the plan's prediction, or use devices that it may not have. So small jobs fill gaps, and no large one starves.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

AGING_SECONDS = 3600.0
"""A job that has waited this long counts as one priority higher, and so on."""


@dataclass(frozen=True)
class Waiting:
    id: str
    owner: str
    priority: int
    queued_at: float
    devices: int
    """How many it needs."""
    predicted_seconds: float | None
    allowed: frozenset[str] | None = None
    """Devices that it may have; None: all."""

    def may_have(self, device: str) -> bool:
        return self.allowed is None or device in self.allowed


@dataclass(frozen=True)
class Running:
    id: str
    devices: int
    expected_end: float | None


@dataclass(frozen=True)
class Reason:
    """Why a job waits."""

    text: str
    position: int
    """In the queue, from 1."""
    estimated_start: float | None
    """None: not known."""


@dataclass(frozen=True)
class Decision:
    starts: dict[str, list[str]]
    """Devices of each job to start now, in order."""
    waiting: dict[str, Reason]


def ordered(queue: Sequence[Waiting], usage: Mapping[str, float], now: float) -> list[Waiting]:
    """`usage`: recent device seconds of each user."""

    def rank(job: Waiting) -> tuple[float, float, float, str]:
        aged = job.priority + math.floor(max(0.0, now - job.queued_at) / AGING_SECONDS)
        return (-aged, usage.get(job.owner, 0.0), job.queued_at, job.id)

    return sorted(queue, key=rank)


def decide(
    queue: Sequence[Waiting],
    running: Sequence[Running],
    devices: Sequence[str],
    held: Mapping[str, str],
    usage: Mapping[str, float],
    now: float,
    *,
    disabled: int = 0,
) -> Decision:
    """`devices`: all that may be used; `held`: device -> job that holds it; `disabled`: how many others there are."""
    others = f" ({disabled} disabled)" if disabled else ""
    holders = dict(held)
    active = list(running)
    starts: dict[str, list[str]] = {}
    waiting: dict[str, Reason] = {}
    first: Waiting | None = None
    reserved_at: float | None = None
    for job in ordered(queue, usage, now):
        usable = [device for device in devices if job.may_have(device)]
        free = [device for device in usable if device not in holders]
        position = len(waiting) + 1
        if len(free) < job.devices:
            text = f"needs {job.devices} of {len(usable)} devices{others}"
            if len(usable) < job.devices:  # until somebody enables more, it keeps nobody waiting
                waiting[job.id] = Reason(f"{text}; {len(free)} free", position, None)
            elif first is None:
                first, reserved_at = job, _when_free(job.devices, len(free), _within(active, holders, job))
                waiting[job.id] = Reason(f"{text}; {len(free)} free", position, reserved_at)
            else:
                waiting[job.id] = Reason(f"{text}, {len(free)} free; {position - 1} before it", position, None)
            continue
        if first is not None:
            apart = [device for device in free if not first.may_have(device)]
            if len(apart) >= job.devices:
                free = apart
            elif not _ends_before(job, reserved_at, now):
                text = f"would delay {first.id}, which is first in the queue and needs {first.devices} devices"
                waiting[job.id] = Reason(text, position, None)
                continue
        starts[job.id] = free[: job.devices]
        holders |= dict.fromkeys(starts[job.id], job.id)
        active.append(
            Running(job.id, job.devices, None if job.predicted_seconds is None else now + job.predicted_seconds)
        )
    return Decision(starts, waiting)


def _within(active: Sequence[Running], holders: Mapping[str, str], job: Waiting) -> list[Running]:
    """Running jobs with the devices that `job` could have of them."""
    counted = Counter(holder for device, holder in holders.items() if job.may_have(device))
    return [Running(each.id, counted[each.id], each.expected_end) for each in active]


def _when_free(needed: int, free: int, active: Sequence[Running]) -> float | None:
    """When enough devices will be free, as far as the plans tell; None: not known."""
    known = sorted((job.expected_end, job.devices) for job in active if job.expected_end is not None)
    for end, devices in known:
        free += devices
        if free >= needed:
            return end
    return None


def _ends_before(job: Waiting, moment: float | None, now: float) -> bool:
    return moment is not None and job.predicted_seconds is not None and now + job.predicted_seconds <= moment
