"""Which waiting jobs start now, on which devices, and why the others wait: a pure function.

Order: priority, which grows with waiting; then the user who has used the least device time lately; then who came first.
The first job that does not fit reserves the devices it needs: later ones go ahead only if they end before these are
free, by the plan's prediction, or use devices that it may not have. So small jobs fill gaps (backfill), and large ones
never starve. If pausing running jobs of lower priority frees what the first one needs, they are paused and requeued,
and continue when it is their turn.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

USAGE_DAYS = 30
"""Window of the allowance of device hours."""
AGING_SECONDS = 3600.0
"""Waiting this long raises a job's priority by one."""


@dataclass(frozen=True)
class Place:
    """A position set by an administrator: the job ranks like another one, right before or after it."""

    owner: str
    priority: int
    queued_at: float
    tie: float
    """Order among jobs that rank like the same job; 0 for that job itself."""
    ran: float = 0.0
    """Seconds since `queued_at` in which it ran, before it was paused for another job."""

    def aged(self, now: float) -> int:
        """Priority, raised by waiting."""
        return self.priority + math.floor(max(0.0, now - self.queued_at - self.ran) / AGING_SECONDS)


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
    """Devices that it may use; None: all."""

    place: Place | None = None
    ran: float = 0.0

    def may_have(self, device: str) -> bool:
        return self.allowed is None or device in self.allowed

    @property
    def counts_as(self) -> Place:
        return self.place or Place(self.owner, self.priority, self.queued_at, 0.0, self.ran)


@dataclass(frozen=True)
class Running:
    id: str
    owner: str
    devices: int
    expected_end: float | None
    if_paused: Waiting | None = None
    """The job as it would be queued if paused; None: it may not be paused for others."""
    is_leaving: bool = False
    """It is being ended or paused, and will free its devices in a moment."""


@dataclass(frozen=True)
class Reason:
    """Why a job waits."""

    text: str
    position: int
    """Position in the queue, from 1."""
    estimated_start: float | None
    """None: not known."""


@dataclass(frozen=True)
class Allowance:
    """Limits of a user; None: unlimited."""

    running: int | None = None
    """Jobs running at a time."""
    hours: float | None = None
    """Device hours in the last 30 days; jobs that are running when it is used up continue."""


UNLIMITED = Allowance()


@dataclass(frozen=True)
class Decision:
    starts: dict[str, list[str]]
    """Devices of each job to start now, in order."""
    waiting: dict[str, Reason]
    pauses: dict[str, str] = field(default_factory=dict)
    """Running job to pause -> the waiting job that needs its devices."""


def ordered(queue: Sequence[Waiting], usage: Mapping[str, float], now: float) -> list[Waiting]:
    """`usage`: recent device seconds of each user."""

    def rank(job: Waiting) -> tuple[float, float, float, float, str]:
        place = job.counts_as
        return (-place.aged(now), usage.get(place.owner, 0.0), place.queued_at, place.tie, job.id)

    return sorted(queue, key=rank)


def place_before(order: Sequence[Waiting], job_id: str, before: str | None) -> Place:
    """Return the place of a queued job right before another one; None: at the end. `order`: the whole queue."""
    others = [job for job in order if job.id != job_id]
    index = len(others) if before is None else next(i for i, job in enumerate(others) if job.id == before)
    ahead = others[index - 1].counts_as if index else None
    if before is None:
        assert ahead is not None, "a queue of one is not reordered"
        return replace(ahead, tie=ahead.tie + 1)
    behind = others[index].counts_as
    if ahead is not None and replace(ahead, tie=0.0) == replace(behind, tie=0.0):
        return replace(behind, tie=(ahead.tie + behind.tie) / 2)
    return replace(behind, tie=behind.tie - 1)


def decide(
    queue: Sequence[Waiting],
    running: Sequence[Running],
    devices: Sequence[str],
    held: Mapping[str, str],
    usage: Mapping[str, float],
    now: float,
    allowance: Allowance = UNLIMITED,
    hours: Mapping[str, float] | None = None,
    unusable: Mapping[str, str] | None = None,
) -> Decision:
    """`devices`: all there are; `held`: device -> job that holds it; `hours`: device hours of each user that count
    against the allowance; `unusable`: why no job is started on a device."""
    unusable, holders, active = unusable or {}, dict(held), list(running)
    running_of = Counter(job.owner for job in running)
    starts: dict[str, list[str]] = {}
    waiting: dict[str, Reason] = {}
    pauses: dict[str, str] = {}
    first: Waiting | None = None
    reserved_at: float | None = None
    order, in_turn = ordered(queue, usage, now), []
    for job in order:
        mine = [device for device in devices if job.may_have(device)]
        usable = [device for device in mine if device not in unusable]
        free = [device for device in usable if device not in holders]
        position = len(waiting) + 1
        refused = _refused(allowance, running_of[job.owner], (hours or {}).get(job.owner, 0.0))
        if refused is not None:  # it reserves nothing, so that its user's limit does not delay others
            waiting[job.id] = Reason(refused, position, None)
            continue
        if len(free) < job.devices:
            text = _shortage(job, len(mine), len(free), {name: unusable[name] for name in mine if name in unusable})
            if first is None and len(usable) >= job.devices:  # a job that cannot be served must not block the queue
                within = _within(active, {name: holders[name] for name in usable if name in holders})
                first, reserved_at = job, _when_free(job.devices, len(free), within)
                victims = _victims(job, job.devices - len(free), within, now)
                if victims:
                    pauses, reserved_at = dict.fromkeys(victims, job.id), now
                leaving = [*victims, *(each.id for each in within if each.is_leaving and each.devices)]
                text += f"; {', '.join(leaving)} makes room" if leaving else ""
            elif first is not None:
                text += f"; {position - 1} before it"
            waiting[job.id] = Reason(text, position, now if pauses and job is first else None)
            if len(usable) >= job.devices and not (pauses and job is first):
                in_turn.append(job)
            continue
        if first is not None:
            apart = [device for device in free if not first.may_have(device)]
            if len(apart) < job.devices and not _ends_before(job, reserved_at, now):
                text = f"would delay {first.id}, which is first in the queue and needs {first.devices} devices"
                waiting[job.id] = Reason(text, position, None)
                in_turn.append(job)
                continue
            free = apart if len(apart) >= job.devices else free
        starts[job.id] = free[: job.devices]
        holders |= dict.fromkeys(starts[job.id], job.id)
        end = None if job.predicted_seconds is None else now + job.predicted_seconds
        active.append(Running(job.id, job.owner, job.devices, end))
        running_of[job.owner] += 1
    frees_at = _frees_at([name for name in devices if name not in unusable], holders, active, now)
    for name, at in _estimated_starts(in_turn, frees_at).items():
        waiting[name] = replace(waiting[name], estimated_start=at)
    return Decision(starts, waiting, pauses)


def _shortage(job: Waiting, devices: int, free: int, unusable: Mapping[str, str]) -> str:
    why = ", ".join(f"{name} {reason}" for name, reason in sorted(unusable.items()))
    return f"needs {job.devices} of {devices} devices; {free} free{f' ({why})' if why else ''}"


def _within(active: Sequence[Running], holders: Mapping[str, str]) -> list[Running]:
    """Return running jobs, each with the number of these devices that it holds."""
    counted = Counter(holders.values())
    return [replace(each, devices=counted[each.id]) for each in active]


def _victims(job: Waiting, missing: int, active: Sequence[Running], now: float) -> list[str]:
    """Return running jobs to pause so that `job` gets the devices it lacks; none if that is not enough, or not needed.

    Lowest priority first, then the most recently started. Priority gained by waiting counts as well: otherwise a paused
    job would start again before the one it was paused for.
    """
    missing -= sum(each.devices for each in active if each.is_leaving)
    lower = [
        each for each in active if each.if_paused is not None and each.devices and _outranks(job, each.if_paused, now)
    ]
    lower.sort(key=lambda each: (each.if_paused.priority, each.if_paused.ran, each.id))  # type: ignore[union-attr]
    chosen: list[Running] = []
    for each in lower:
        if sum(one.devices for one in chosen) < missing:
            chosen.append(each)
    if sum(each.devices for each in chosen) < missing:
        return []
    for each in chosen[::-1]:  # a large one may have made a small one unnecessary
        if sum(one.devices for one in chosen if one is not each) >= missing:
            chosen.remove(each)
    return [each.id for each in chosen]


def _outranks(job: Waiting, other: Waiting, now: float) -> bool:
    return job.priority > other.priority and job.counts_as.aged(now) > other.counts_as.aged(now)


def _frees_at(
    devices: Sequence[str], holders: Mapping[str, str], active: Sequence[Running], now: float
) -> dict[str, float]:
    """When each device will be free; infinity: not known."""
    ends = {each.id: each.expected_end for each in active}
    found = {}
    for name in devices:
        end = ends.get(holders[name]) if name in holders else now
        found[name] = math.inf if end is None else max(end, now)
    return found


def _estimated_starts(in_turn: Sequence[Waiting], frees_at: dict[str, float]) -> dict[str, float | None]:
    """Estimate when each job starts if all run in order, for their predicted time; None: unknown."""
    found: dict[str, float | None] = {}
    for job in in_turn:
        soonest = sorted((moment, name) for name, moment in frees_at.items() if job.may_have(name))[: job.devices]
        start = soonest[-1][0] if len(soonest) == job.devices else math.inf
        found[job.id] = None if math.isinf(start) else start
        end = math.inf if job.predicted_seconds is None else start + job.predicted_seconds
        frees_at |= {name: end for _, name in soonest}
    return found


def _refused(allowance: Allowance, running: int, hours: float) -> str | None:
    if allowance.running is not None and running >= allowance.running:
        return f"its user runs {running} job(s), as many as are allowed at a time"
    if allowance.hours is not None and hours >= allowance.hours:
        return f"its user has used {hours:.1f} of {allowance.hours:g} device hours of the last {USAGE_DAYS} days"
    return None


def _when_free(needed: int, free: int, active: Sequence[Running]) -> float | None:
    """Estimate from the plans when enough devices will be free; None: unknown."""
    known = sorted((job.expected_end, job.devices) for job in active if job.expected_end is not None)
    for end, devices in known:
        free += devices
        if free >= needed:
            return end
    return None


def _ends_before(job: Waiting, moment: float | None, now: float) -> bool:
    return moment is not None and job.predicted_seconds is not None and now + job.predicted_seconds <= moment
