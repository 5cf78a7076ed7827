"""Which waiting jobs start now, on which devices, and why the others wait: a pure function.

Order: priority, which grows with waiting; then the user who has used the least device time lately; then who came first.
The first job that does not fit reserves the devices it needs: later ones go ahead only if they end before these are
free, by the plan's prediction, or use devices that it may not have. So small jobs fill gaps (backfill), and large ones
never starve. If pausing running jobs of lower priority frees what the first one needs, they are paused and requeued,
and continue when it is their turn.

Devices may be shares of GPUs (`inventory`). A job gets one share of each of its GPUs, the least shared ones first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pantheraml.service.jobs.inventory import card_of

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
class WaitingJob:
    id: str
    owner: str
    priority: int
    queued_at: float
    devices: int
    """How many it needs."""
    predicted_seconds: float | None
    allowed: frozenset[str] | None = None
    """GPUs that it may use; None: all."""

    place: Place | None = None
    ran: float = 0.0

    def may_have(self, device: str) -> bool:
        return self.allowed is None or card_of(device) in self.allowed

    @property
    def counts_as(self) -> Place:
        return self.place or Place(self.owner, self.priority, self.queued_at, 0.0, self.ran)


@dataclass(frozen=True)
class Running:
    id: str
    owner: str
    expected_end: float | None
    if_paused: WaitingJob | None = None
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


def ordered(queue: Sequence[WaitingJob], usage: Mapping[str, float], now: float) -> list[WaitingJob]:
    """`usage`: recent device seconds of each user."""

    def rank(job: WaitingJob) -> tuple[float, float, float, float, str]:
        place = job.counts_as
        return (-place.aged(now), usage.get(place.owner, 0.0), place.queued_at, place.tie, job.id)

    return sorted(queue, key=rank)


def place_before(order: Sequence[WaitingJob], job_id: str, before: str | None) -> Place:
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
    queue: Sequence[WaitingJob],
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
    against the allowance; `unusable`: why no job is started on a GPU or CPU slot."""
    unusable, holders, active = unusable or {}, dict(held), list(running)
    running_of = Counter(job.owner for job in running)
    starts: dict[str, list[str]] = {}
    waiting: dict[str, Reason] = {}
    pauses: dict[str, str] = {}
    first: WaitingJob | None = None
    reserved_at: float | None = None
    order, in_turn = ordered(queue, usage, now), []
    choices: dict[frozenset[str] | None, _Choice] = {}
    for job in order:
        choice = choices[job.allowed] = choices.get(job.allowed) or _choice(job, devices, unusable, holders)
        usable, free = choice.usable, choice.free
        position = len(waiting) + 1
        refused = _refused(allowance, running_of[job.owner], (hours or {}).get(job.owner, 0.0))
        if refused is not None:  # it reserves nothing, so that its user's limit does not delay others
            waiting[job.id] = Reason(refused, position, None)
            continue
        if len(free) < job.devices:
            text = f"needs {job.devices} of {choice.text}"
            can_be_served = choice.usable_cards >= job.devices
            if first is None and can_be_served:  # a job that cannot be served must not block the queue
                missing, gives = job.devices - len(free), _gives(usable, free, holders)
                first, reserved_at = job, _when_free(missing, active, gives)
                victims = _victims(job, missing, active, gives, now)
                if victims:
                    pauses, reserved_at = dict.fromkeys(victims, job.id), now
                leaving = [*victims, *(each.id for each in active if each.is_leaving and each.id in gives)]
                text += f"; {', '.join(leaving)} makes room" if leaving else ""
            elif first is not None:
                text += f"; {position - 1} before it"
            waiting[job.id] = Reason(text, position, now if pauses and job is first else None)
            if can_be_served and not (pauses and job is first):
                in_turn.append(job)
            continue
        if first is not None:
            apart = _apart(first, usable, holders)
            if len(apart) < job.devices and not _ends_before(job, reserved_at, now):
                text = f"would delay {first.id}, which is first in the queue and needs {first.devices} devices"
                waiting[job.id] = Reason(text, position, None)
                in_turn.append(job)
                continue
            free = apart if len(apart) >= job.devices else free
        starts[job.id] = free[: job.devices]
        holders |= dict.fromkeys(starts[job.id], job.id)
        choices.clear()
        end = None if job.predicted_seconds is None else now + job.predicted_seconds
        active.append(Running(job.id, job.owner, end))
        running_of[job.owner] += 1
    frees_at = _frees_at([name for name in devices if card_of(name) not in unusable], holders, active, now)
    for name, at in _estimated_starts(in_turn, frees_at).items():
        waiting[name] = replace(waiting[name], estimated_start=at)
    return Decision(starts, waiting, pauses)


def _cards(devices: Iterable[str]) -> set[str]:
    return {card_of(name) for name in devices}


@dataclass(frozen=True)
class _Choice:
    """GPUs that jobs with access to the same ones may have."""

    usable: list[str]
    usable_cards: int
    free: list[str]
    """One share of each GPU."""
    text: str


def _choice(
    job: WaitingJob, devices: Sequence[str], unusable: Mapping[str, str], holders: Mapping[str, str]
) -> _Choice:
    mine = [device for device in devices if job.may_have(device)]
    usable = [device for device in mine if card_of(device) not in unusable]
    free = _one_per_card([device for device in usable if device not in holders], holders)
    cards = _cards(mine)
    why = ", ".join(f"{name} {unusable[name]}" for name in sorted(cards) if name in unusable)
    text = f"{len(cards)} devices; {len(free)} free{f' ({why})' if why else ''}"
    return _Choice(usable, len(_cards(usable)), free, text)


def _one_per_card(free: Sequence[str], holders: Mapping[str, str]) -> list[str]:
    """Return the first free share of each GPU, those of the least shared GPUs first."""
    firsts: dict[str, str] = {}
    for name in free:
        firsts.setdefault(card_of(name), name)
    if len(firsts) < len(free):
        taken = Counter(map(card_of, holders))
        return sorted(firsts.values(), key=lambda name: taken[card_of(name)])
    return list(firsts.values())


def _apart(first: WaitingJob, usable: Sequence[str], holders: Mapping[str, str]) -> list[str]:
    """Return free devices that the first job in the queue cannot need: not its GPUs, or beyond one share of each."""
    kept: set[str] = set()
    found = []
    for name in (device for device in usable if device not in holders):
        if first.may_have(name) and card_of(name) not in kept:
            kept.add(card_of(name))
        else:
            found.append(name)
    return _one_per_card(found, holders)


def _gives(usable: Sequence[str], free: Sequence[str], holders: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the GPUs, or CPU slots, of which each job would free a share where there is none now."""
    found: dict[str, set[str]] = {}
    has_one = _cards(free)
    for name in usable:
        if name in holders and card_of(name) not in has_one:
            found.setdefault(holders[name], set()).add(card_of(name))
    return found


def _victims(
    job: WaitingJob, missing: int, active: Sequence[Running], gives: Mapping[str, set[str]], now: float
) -> list[str]:
    """Return running jobs to pause so that `job` gets the devices it lacks; none if that is not enough, or not needed.

    Lowest priority first, then the most recently started. Priority gained by waiting counts as well: otherwise a paused
    job would start again before the one it was paused for.
    """
    leaving = [each.id for each in active if each.is_leaving]

    def is_enough(chosen: Iterable[str]) -> bool:
        return len(set().union(*(gives.get(name, set()) for name in (*leaving, *chosen)))) >= missing

    lower = [
        each
        for each in active
        if each.if_paused is not None and each.id in gives and _outranks(job, each.if_paused, now)
    ]
    lower.sort(key=lambda each: (each.if_paused.priority, each.if_paused.ran, each.id))  # type: ignore[union-attr]
    chosen: list[str] = []
    for each in lower:
        if not is_enough(chosen):
            chosen.append(each.id)
    if not is_enough(chosen):
        return []
    for name in chosen[::-1]:  # a large one may have made a small one unnecessary
        if is_enough(one for one in chosen if one != name):
            chosen.remove(name)
    return chosen


def _outranks(job: WaitingJob, other: WaitingJob, now: float) -> bool:
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


def _estimated_starts(in_turn: Sequence[WaitingJob], frees_at: dict[str, float]) -> dict[str, float | None]:
    """Estimate when each job starts if all run in order, for their predicted time; None: unknown."""
    found: dict[str, float | None] = {}
    for job in in_turn:
        of_cards: dict[str, str] = {}
        for _, name in sorted((moment, name) for name, moment in frees_at.items() if job.may_have(name)):
            of_cards.setdefault(card_of(name), name)
        soonest = list(of_cards.values())[: job.devices]
        start = frees_at[soonest[-1]] if len(soonest) == job.devices else math.inf
        found[job.id] = None if math.isinf(start) else start
        end = math.inf if job.predicted_seconds is None else start + job.predicted_seconds
        frees_at |= dict.fromkeys(soonest, end)
    return found


def _refused(allowance: Allowance, running: int, hours: float) -> str | None:
    if allowance.running is not None and running >= allowance.running:
        return f"its user runs {running} job(s), as many as are allowed at a time"
    if allowance.hours is not None and hours >= allowance.hours:
        return f"its user has used {hours:.1f} of {allowance.hours:g} device hours of the last {USAGE_DAYS} days"
    return None


def _when_free(missing: int, active: Sequence[Running], gives: Mapping[str, set[str]]) -> float | None:
    """Estimate from the plans when enough devices will be free; None: unknown."""
    freed: set[str] = set()
    for end, name in sorted((job.expected_end, job.id) for job in active if job.expected_end is not None):
        freed |= gives.get(name, set())
        if len(freed) >= missing:
            return end
    return None


def _ends_before(job: WaitingJob, moment: float | None, now: float) -> bool:
    return moment is not None and job.predicted_seconds is not None and now + job.predicted_seconds <= moment
