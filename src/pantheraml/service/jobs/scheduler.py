"""Which waiting jobs start now, on which devices, and why the others wait: a pure function.

Order: priority, which grows with waiting; then the user who has used the least device time lately; then who came first.
The first job that does not fit reserves the devices it needs: later ones go ahead only if they end before these are
free, by the plan's prediction. So small jobs fill gaps, and no large one starves.
"""

from __future__ import annotations

import math
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
) -> Decision:
    """`devices`: all there are; `held`: device -> job that holds it."""
    free = [device for device in devices if device not in held]
    active = list(running)
    starts: dict[str, list[str]] = {}
    waiting: dict[str, Reason] = {}
    first: Waiting | None = None
    reserved_at: float | None = None
    for job in ordered(queue, usage, now):
        position = len(waiting) + 1
        if first is None and job.devices <= len(free):
            pass
        elif first is None:
            first, reserved_at = job, _when_free(job.devices, len(free), active)
            text = f"needs {job.devices} of {len(devices)} devices; {len(free)} free"
            waiting[job.id] = Reason(text, position, reserved_at)
            continue
        elif job.devices > len(free):
            text = f"needs {job.devices} of {len(devices)} devices, {len(free)} free; {position - 1} before it"
            waiting[job.id] = Reason(text, position, None)
            continue
        elif not _ends_before(job, reserved_at, now):
            text = f"would delay {first.id}, which is first in the queue and needs {first.devices} devices"
            waiting[job.id] = Reason(text, position, None)
            continue
        starts[job.id], free = free[: job.devices], free[job.devices :]
        end = None if job.predicted_seconds is None else now + job.predicted_seconds
        active.append(Running(job.id, job.devices, end))
    return Decision(starts, waiting)


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
