"""The loop that starts, watches and ends jobs.

All of its state is in the database and in the jobs' folders. It can be killed at any moment: runs continue under their
supervisors, and the next dispatcher adopts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from pantheraml.base import log
from pantheraml.base.errors import PantheraError
from pantheraml.devices.probe import usable_cores
from pantheraml.runs.supervised import Limits, RunExit, SupervisedRun
from pantheraml.service.jobs.alarm import Alarm, HealthOfGPUs
from pantheraml.service.jobs.housekeeping import EVERY_SECONDS, keep_house
from pantheraml.service.jobs.ingest import PathHider, damage_event, energy_of, to_job_event
from pantheraml.service.jobs.inventory import LeasableDevices, card_of, gpu_indices
from pantheraml.service.jobs.notifier import Notifier
from pantheraml.service.jobs.pace import Pace, pace_of
from pantheraml.service.jobs.results import write_results
from pantheraml.service.jobs.scheduler import USAGE_DAYS, Decision, Reason, Running, decide
from pantheraml.service.jobs.states import ACTIVE, ENDED, ForbiddenTransitionError, State
from pantheraml.service.jobs.usage import device_seconds
from pantheraml.service.jobs.watch import Observation, observe
from pantheraml.service.schemas.fine_tuning import model_name
from pantheraml.service.settings import Settings
from pantheraml.service.store.database import Database, is_away
from pantheraml.service.store.devices import disabled_devices
from pantheraml.service.store.jobs import StaleJobError, if_paused, jobs_in, leases, move, reread, waiting_jobs
from pantheraml.service.store.tables import Event, Job, Lease
from pantheraml.service.store.usage import add_energy, device_hours, open_stretch

logger: logging.Logger = log.get(__name__)

TICK_SECONDS = 0.25
SCHEDULE_SECONDS = 2.0
"""Seconds between passes over an unchanged queue."""
ALIVE_SECONDS = 60.0
KILL_SECONDS = 6.0
"""Seconds after which a cancelled job is killed if its supervisor has not exited."""
ORPHAN_SECONDS = 20.0
"""Seconds for workers that lost their supervisor to save and exit."""


class Dispatcher:
    def __init__(
        self,
        database: Database,
        settings: Settings,
        inventory: LeasableDevices,
        notifier: Notifier,
        health: HealthOfGPUs,
    ) -> None:
        self._database, self._settings, self._health = database, settings, health
        self._alarm = Alarm(database, settings.stall_seconds, health)
        self.inventory = inventory
        self._notifier = notifier
        self.limits = Limits([settings.models_dir.resolve(), settings.files.resolve()], settings.cache.resolve())
        """Limits on what the processes of jobs may access."""
        self._wake = asyncio.Event()
        self.hide = PathHider({"[models]": settings.models_dir, "[data]": settings.data_dir})
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        """Supervisors that this process started, to be reaped."""
        self._signalled: set[tuple[str, int, State]] = set()
        self._lost_since: dict[tuple[str, int], float] = {}
        self._reasons: dict[str, Reason] = {}
        self._ends: dict[str, float | None] = {}
        """Expected end of each running job."""
        self._queue_changed, self._scheduled = True, 0.0
        self._ticked = time.monotonic()
        self._tidied = -EVERY_SECONDS
        self._allotting = asyncio.Lock()
        self._lent: tuple[str, Callable[[], Awaitable[None]]] | None = None
        """Idle device lent to chat, and the callback that reclaims it."""

    def wake(self) -> None:
        """Wake the loop: a request came in."""
        self._queue_changed = True
        self._wake.set()

    async def reschedule(self) -> None:
        """Reschedule the queue now, so that answers show its new order; start nothing yet."""
        await self._decide()
        self.wake()

    def reason(self, job_id: str) -> Reason | None:
        """Return why a queued job waits; None before the first pass."""
        return self._reasons.get(job_id)

    def queue(self) -> list[str]:
        """Queued jobs in their order, at the last look."""
        return list(self._reasons)

    def expected_end(self, job_id: str) -> float | None:
        """Return the expected end of a running job, from its pace or, before it has one, its plan; None: unknown."""
        return self._ends.get(job_id)

    @property
    def is_alive(self) -> bool:
        """True if the loop has run lately."""
        return time.monotonic() - self._ticked < ALIVE_SECONDS

    async def run(self) -> None:
        while True:
            try:
                if await self._database.still_claimed():
                    await self.tick()
                    self._ticked = time.monotonic()
                else:
                    logger.error("another service has taken this database: no job is started or watched here")
                    await asyncio.sleep(1.0)
            except Exception as err:
                if is_away(err):
                    logger.error("the database does not answer; the dispatcher tries again: %s", err)
                else:
                    logger.exception("the dispatcher failed once; it tries again")
                await asyncio.sleep(1.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._wake.wait()
            self._wake.clear()

    async def tick(self) -> None:
        for name, process in list(self._processes.items()):
            if process.poll() is not None:
                del self._processes[name]
        async with self._database.read() as session:
            active = await jobs_in(session, [*ACTIVE, State.CRASHED])
        for job in active:
            try:
                await self._watch(job)
            except (StaleJobError, ForbiddenTransitionError) as err:
                logger.info("%s: %s; it is looked at again", job.id, err)
        if self._queue_changed or time.monotonic() - self._scheduled > SCHEDULE_SECONDS:
            self._queue_changed, self._scheduled = False, time.monotonic()
            async with self._allotting:
                await self._take_back_unusable()
                await self._schedule()
        if time.monotonic() - self._tidied > EVERY_SECONDS:
            await keep_house(self._database, self._settings)
            self._tidied = time.monotonic()

    # Lending ----------------------------------------------------------------------------------------------------------

    async def borrow(self, give_back: Callable[[], Awaitable[None]]) -> str | None:
        """Lend a device that no job holds, for `returned` or until a job needs it: then `give_back` is called, and the
        job starts when it returns. None: jobs hold all of them, or they are out of use."""
        async with self._allotting:
            async with self._database.read() as session:
                held = self.inventory.held(await leases(session))
                out = {*await disabled_devices(session), *self._failed_gpus()}
            free = [name for name in self.inventory.devices if name not in held and card_of(name) not in out]
            if not free:
                return None
            taken = Counter(map(card_of, held))
            chosen = min(reversed(free), key=lambda name: taken[card_of(name)])
            self._lent = chosen, give_back
            return chosen

    def returned(self, name: str) -> None:
        if self._lent is not None and self._lent[0] == name:
            self._lent = None

    async def _take_back(self, devices: Iterable[str]) -> None:
        if self._lent is not None and self._lent[0] in devices:
            await self._lent[1]()
            self._lent = None

    async def _take_back_unusable(self) -> None:
        if self._lent is not None:
            async with self._database.read() as session:
                out = {*await disabled_devices(session), *self._failed_gpus()}
            await self._take_back(name for name in self.inventory.devices if card_of(name) in out)

    # Starting ---------------------------------------------------------------------------------------------------------

    async def _schedule(self) -> None:
        decision = await self._decide()
        for job_id, chosen in decision.starts.items():
            async with self._database.read() as session:
                job = await session.get_one(Job, job_id)
            if job.state == State.QUEUED:
                await self._take_back(chosen)
                await self._start(job, chosen)
        for job_id, other in decision.pauses.items():
            await self._make_room(job_id, other)

    async def _make_room(self, job_id: str, other: str) -> None:
        """Pause a running job for one of higher priority; `_paused` puts it back into the queue."""
        try:
            async with self._database.write() as session:
                job = await session.get_one(Job, job_id)
                if if_paused(job, time.time()) is None:
                    return  # it has ended, or is about to
                message = f"Pausing: {other} has a higher priority"
                await move(session, job, State.PAUSING, message, preempted_by=other)
        except (StaleJobError, ForbiddenTransitionError):
            return
        self._done(job)

    async def _decide(self) -> Decision:
        """Decide which jobs start now and on which devices, which are paused for them, and why the others wait."""
        now = time.time()
        async with self._database.read() as session:
            queue = await waiting_jobs(session)
            running = await jobs_in(session, ACTIVE)
            self._ends = {job.id: _expected_end(job, await pace_of(session, job.id), now) for job in running}
            if not queue:
                self._reasons = {}
                return Decision({}, {})
            held = {name: lease.job_id for name, lease in self.inventory.held(await leases(session)).items()}
            usage = await device_seconds(session)
            disabled = await disabled_devices(session)
            allowance = self._settings.allowance
            hours = {} if allowance.hours is None else await device_hours(session, USAGE_DAYS)
        active = [_as_running(job, self._ends[job.id], now) for job in running]
        lent = None if self._lent is None else self._lent[0]
        devices = sorted(self.inventory.devices, key=lambda name: name == lent)  # others first
        unusable = dict.fromkeys(self._failed_gpus(), "not healthy") | dict.fromkeys(disabled, "disabled")
        decision = decide(queue, active, devices, held, usage, now, allowance, hours, unusable)
        self._reasons = decision.waiting
        return decision

    def _failed_gpus(self) -> list[str]:
        """Return unhealthy devices, on which no job is started; those with mere warnings are used."""
        return [f"gpu:{index}" for index, health in self._health().items() if health.status == "fail"]

    async def _start(self, job: Job, devices: list[str]) -> None:
        """Lease the devices, then start the supervisor. If the service is killed in between, the next dispatcher finds
        nothing running under the new token and requeues the job."""
        now = time.time()
        try:
            async with self._database.write() as session:
                token = job.token + 1
                session.add_all(Lease(resource=name, job_id=job.id, token=token, created_at=now) for name in devices)
                open_stretch(session, job, token, devices, now)
                await session.flush()
                await move(
                    session,
                    job,
                    State.STARTING,
                    f"Starting on {', '.join(devices)}",
                    token=token,
                    started_at=now,
                    leased=devices,
                    preempted_by=None,
                )
        except (IntegrityError, StaleJobError, ForbiddenTransitionError):
            return  # taken by another service, or changed by its user
        self._notifier.notify(job.id)
        config = dict(job.config)
        parallel = config["parallel"] = {**config["parallel"], "device_ids": gpu_indices(devices)}
        if self.inventory.memory_fraction is not None:  # it may have been planned when it had the GPU for itself
            parallel["memory_fraction"] = min(parallel["memory_fraction"] or 1.0, self.inventory.memory_fraction)
        try:
            cores = self.inventory.cores_of(devices, usable_cores())
            process = await asyncio.to_thread(self._supervised(job).start, config, job.token, self.limits, cores)
        except PantheraError as err:
            await self._crashed(job, err.what)
        else:
            self._processes[job.id] = process

    def _supervised(self, job: Job) -> SupervisedRun:
        return SupervisedRun(self._settings.jobs.resolve() / job.id, job.id)

    # Watching ---------------------------------------------------------------------------------------------------------

    async def _watch(self, job: Job) -> None:
        if job.state == State.CRASHED:
            await self._retry(job)
            return
        seen = await asyncio.to_thread(observe, self._settings.jobs.resolve(), job.id, job.token, job.events_offset)
        await self._record(job, seen)
        if seen.exit is not None:
            await self._ended(job, seen.exit)
        elif seen.lost:
            await self._lost(job)
        else:
            if job.state == State.RUNNING and await self._alarm.look(job, seen.events):
                self._notifier.notify(job.id)
            await self._press(job)

    async def _record(self, job: Job, seen: Observation) -> None:
        """Store new events of the run. Their offset is stored in the same transaction, so each event is stored exactly
        once, even across crashes."""
        if seen.offset == job.events_offset:
            return
        async with self._database.write() as session:
            current = await session.get_one(Job, job.id)
            if current.events_offset != job.events_offset:
                raise StaleJobError("another dispatcher reads its events")
            session.add_all(
                event for each in seen.events if (event := to_job_event(job.id, each, self.hide)) is not None
            )
            if seen.damaged_lines:
                session.add(damage_event(job.id, seen.damaged_lines))
            current.events_offset = job.events_offset = seen.offset
            joules = energy_of(seen.events, await self._holders(session))
            if joules is not None:
                await add_energy(session, current, joules)
            if seen.training and current.state == State.STARTING:
                await move(session, current, State.RUNNING, "Fine-tuning job started")
            await session.flush()
            await reread(session, job)
        self._notifier.notify(job.id)

    async def _holders(self, session: AsyncSession) -> Counter[int]:
        """How many jobs, and chat, are on each GPU."""
        names = [*await leases(session), *([] if self._lent is None else [self._lent[0]])]
        return Counter(gpu_indices(names) or [])

    async def _press(self, job: Job) -> None:
        """Make a running job carry out a requested pause or cancellation."""
        run, state = self._supervised(job), State(job.state)
        over = job.max_runtime is not None and job.started_at is not None
        if over and state in (State.STARTING, State.RUNNING) and _runtime(job) > (job.max_runtime or 0.0):
            error = {"code": "max_runtime", "message": f"It ran longer than {job.max_runtime:.0f} s.", "param": None}
            await self._move(job, State.CANCELLING, "Cancelled: its maximum runtime is over", error=error)
            return
        mark = (job.id, job.token, state)
        if state is State.PAUSING and mark not in self._signalled:
            await asyncio.to_thread(run.ask_to_stop, job.token)
            self._signalled.add(mark)
        elif state is State.CANCELLING and mark not in self._signalled:
            await asyncio.to_thread(run.stop_now, job.token)
            self._signalled.add(mark)
        elif state is State.CANCELLING and time.time() - job.state_at > KILL_SECONDS:
            await asyncio.to_thread(run.kill)

    async def _lost(self, job: Job) -> None:
        """Handle a job whose supervisor was killed, or whose machine went down: its workers save and exit, or are
        killed."""
        run = self._supervised(job)
        since = self._lost_since.setdefault((job.id, job.token), time.monotonic())
        waited = time.monotonic() - since
        patient = job.state != State.CANCELLING and waited < ORPHAN_SECONDS
        if patient and await asyncio.to_thread(run.is_anyone_left):
            return
        await asyncio.to_thread(run.kill)
        del self._lost_since[job.id, job.token]
        if job.state == State.CANCELLING:
            await self._move(job, State.CANCELLED, "Cancelled", **_finished(job))
        elif job.state == State.PAUSING:
            await self._paused(job, "Paused: its processes were gone")
        else:
            await self._crashed(job, "Its supervisor was killed, or this machine restarted.")

    # Ending -----------------------------------------------------------------------------------------------------------

    async def _ended(self, job: Job, ended: RunExit) -> None:
        await asyncio.to_thread(self._supervised(job).kill)  # no process of this start may survive into the next one
        state = State(job.state)
        if state is State.CANCELLING:
            await self._move(job, State.CANCELLED, "Cancelled", **_finished(job))
        elif ended.status == "succeeded":
            await self._succeeded(job)
        elif ended.status == "failed":
            await self._failed(job, ended)
        elif state is State.PAUSING:
            await self._paused(job, "Paused; its state is saved")
        else:
            await self._crashed(job, ended.what or "Its processes ended without a word.")

    async def _succeeded(self, job: Job) -> None:
        trained = self._supervised(job).run_dir.trained()
        async with self._database.read() as session:
            kinds = Event.kind.in_(["train.step", "eval.done"])
            steps = (await session.scalars(select(Event).where(Event.job_id == job.id, kinds).order_by(Event.id))).all()
        files = []
        if not job.is_test:
            files = await asyncio.to_thread(write_results, self._settings.files, job.owner, steps, trained)
        latest = {event.step: event.data for event in steps if event.kind == "train.step"}
        tokens = sum(int(data.get("tokens") or 0) for data in latest.values())
        async with self._database.write() as session:
            if job.state == State.STARTING:
                await move(session, job, State.RUNNING, "Fine-tuning job started")
            session.add_all(files)
            changes = {
                **_finished(job),
                "result_files": [file.id for file in files],
                "fine_tuned_model": None if job.is_test else model_name(job),
                "trained_tokens": tokens,
            }
            message = "Test passed" if job.is_test else f"New fine-tuned model created: {model_name(job)}"
            await move(session, job, State.SUCCEEDED, message, **changes)
        self._done(job)

    async def _failed(self, job: Job, ended: RunExit) -> None:
        message = self.hide(" ".join(part for part in (ended.what, ended.fix) if part))
        error = {"code": ended.error or "failed", "message": message, "param": None}
        await self._move(job, State.FAILED, self.hide(f"Failed: {ended.what}"), error=error, **_finished(job))

    async def _paused(self, job: Job, message: str) -> None:
        """A job that was paused for another one is requeued at once."""
        async with self._database.write() as session:
            await move(session, job, State.PAUSED, message, **_stopped(job))
            if job.preempted_by is not None:
                await move(session, job, State.QUEUED, f"Queued again; {job.preempted_by} goes first")
        self._done(job)

    async def _crashed(self, job: Job, why: str) -> None:
        """Count the crash; a new checkpoint resets the count."""
        step = await asyncio.to_thread(self._supervised(job).run_dir.last_checkpoint)
        crashes = 1 if step != job.crashed_at_step else job.crashes + 1
        changes = {**_stopped(job), "crashes": crashes, "crashed_at_step": step}
        await self._move(job, State.CRASHED, self.hide(why), **changes)
        await self._retry(job)

    async def _retry(self, job: Job) -> None:
        if job.crashes < self._settings.max_attempts:
            step = "the beginning" if job.crashed_at_step is None else f"step {job.crashed_at_step}"
            await self._move(job, State.QUEUED, f"Queued again; it continues from {step}")
            return
        message = f"It crashed {job.crashes} times in a row without a new checkpoint."
        error = {"code": "crashed", "message": message, "param": None}
        await self._move(job, State.FAILED, message, error=error, finished_at=time.time())

    async def _move(self, job: Job, to: State, message: str, **changes: Any) -> None:
        async with self._database.write() as session:
            await move(session, job, to, message, **changes)
        self._done(job)

    def _done(self, job: Job) -> None:
        self._queue_changed = True
        self._notifier.notify(job.id)
        if State(job.state) in ENDED:
            self._alarm.forget(job.id)
            self._signalled = {mark for mark in self._signalled if mark[0] != job.id}


def _as_running(job: Job, end: float | None, now: float) -> Running:
    is_leaving = job.state in (State.PAUSING, State.CANCELLING)
    return Running(job.id, job.owner, now if is_leaving else end, if_paused(job, now), is_leaving)


def _expected_end(job: Job, pace: Pace, now: float) -> float | None:
    left = pace.seconds_left(now)
    if left is not None:
        return now + left
    if job.predicted_seconds is None or job.started_at is None:
        return None
    return job.started_at + max(0.0, job.predicted_seconds - job.seconds_run)


def _runtime(job: Job) -> float:
    return job.seconds_run + (0.0 if job.started_at is None else time.time() - job.started_at)


def _stopped(job: Job) -> dict[str, Any]:
    return {"seconds_run": _runtime(job), "started_at": None}


def _finished(job: Job) -> dict[str, Any]:
    return {"finished_at": time.time(), "seconds_run": _runtime(job)}
