"""Which waiting jobs start now, on which devices, and why the others wait: a pure function.

Order: priority, which grows with waiting; then the user who has used the least device time lately; then who came first.
The first job that does not fit reserves the devices it needs: later ones go ahead only if they end before these are
free, by the plan's prediction, or use devices that it may not have. So small jobs fill gaps, and no large one starves.
If pausing running jobs of lower priority frees what the first one needs, they are paused; they stand in the queue then,
and continue when it is their turn.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

USAGE_DAYS = 30
"""Over which an allowance of hours counts."""
AGING_SECONDS = 3600.0
"""A job that has waited this long counts as one priority higher, and so on."""


@dataclass(frozen=True)
class Place:
    """Where an administrator has put a job: it counts as another one, and comes right before or after it."""

    owner: str
    priority: int
    queued_at: float
    tie: float
    """Order among those that count as the same job; 0 for the job itself."""
    ran: float = 0.0
    """Seconds since `queued_at` that were no waiting: it ran, and was paused for another job."""

    def aged(self, now: float) -> int:
        """Priority, with what waiting adds to it."""
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
    """Devices that it may have; None: all."""

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
    """As it would stand in the queue; None: it is not paused for others."""
    is_leaving: bool = False
    """It was told to end or pause, and frees its devices in a moment."""


@dataclass(frozen=True)
class Reason:
    """Why a job waits."""

    text: str
    position: int
    """In the queue, from 1."""
    estimated_start: float | None
    """None: not known."""


@dataclass(frozen=True)
class Allowance:
    """What a user may use; None: no limit."""

    running: int | None = None
    """Jobs at a time."""
    hours: float | None = None
    """Of devices, in the last 30 days; jobs that run when it is used up go on."""


UNLIMITED = Allowance()


@dataclass(frozen=True)
class Decision:
    starts: dict[str, list[str]]
    """Devices of each job to start now, in order."""
    waiting: dict[str, Reason]
    pauses: dict[str, str] = field(default_factory=dict)
    """Running job -> the waiting one that it makes room for."""


def ordered(queue: Sequence[Waiting], usage: Mapping[str, float], now: float) -> list[Waiting]:
    """`usage`: recent device seconds of each user."""

    def rank(job: Waiting) -> tuple[float, float, float, float, str]:
        place = job.counts_as
        return (-place.aged(now), usage.get(place.owner, 0.0), place.queued_at, place.tie, job.id)

    return sorted(queue, key=rank)


def place_before(order: Sequence[Waiting], job_id: str, before: str | None) -> Place:
    """Where a job of the queue has to be put so that it comes right before another one; None: at the end.

    `order`: the queue, in order, with both of them.
    """
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
        if refused is not None:  # it reserves nothing: others are not held up by its user's limit
            waiting[job.id] = Reason(refused, position, None)
            continue
        if len(free) < job.devices:
            text = _shortage(job, len(mine), len(free), {name: unusable[name] for name in mine if name in unusable})
            if first is None and len(usable) >= job.devices:  # one that nobody can serve keeps nobody waiting
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
    """Running jobs, each with as many devices as it holds of these."""
    counted = Counter(holders.values())
    return [replace(each, devices=counted[each.id]) for each in active]


def _victims(job: Waiting, missing: int, active: Sequence[Running], now: float) -> list[str]:
    """Running jobs to pause so that `job` has the devices it misses; none if they would not do, or need not.

    The lowest priority first, then who has most lately started. What waiting has added counts as well: else a paused
    job would start again before the one that it made room for.
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
    for each in chosen[::-1]:  # a large one may have made a small one needless
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
    """When each job starts if all take their turn and need the time that is predicted; None: not known."""
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
    """When enough devices will be free, as far as the plans tell; None: not known."""
    known = sorted((job.expected_end, job.devices) for job in active if job.expected_end is not None)
    for end, devices in known:
        free += devices
        if free >= needed:
            return end
    return None


def _ends_before(job: Waiting, moment: float | None, now: float) -> bool:
    return moment is not None and job.predicted_seconds is not None and now + job.predicted_seconds <= moment
