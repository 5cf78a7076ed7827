"""Metrics for Prometheus: jobs, queue, GPUs, host and accounts, collected at each scrape.

The label of a job is `job_id`, since Prometheus has a `job` of its own. Unknown values have no sample.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from pantheraml import __version__
from pantheraml.service.auth import Principal
from pantheraml.service.context import ServiceContext
from pantheraml.service.jobs.overview import devices_now, host_now, running_now
from pantheraml.service.jobs.states import State
from pantheraml.service.request_metrics import RequestMetrics
from pantheraml.service.store.jobs import leases
from pantheraml.service.store.tables import Event, Job, Lease
from pantheraml.service.store.usage import used
from pantheraml.specs.service_api import DeviceStatus, RunningJob

_HEALTH = {"ok": 0, "warn": 1, "fail": 2}
_WANTING = [state.value for state in (State.QUEUED, State.STARTING, State.RUNNING, State.PAUSING)]
_OF_STEPS = {
    "train_loss": "Training loss of the newest step.",
    "learning_rate": "Learning rate of the newest step.",
    "grad_norm": "Norm of the gradient of the newest step.",
    "tokens_per_second": "Tokens per second at the newest step.",
    "memory_bytes": "Memory that the job uses on its first device.",
}
_OF_GPUS = {
    "memory_total_bytes": "Memory of the GPU.",
    "memory_used_bytes": "Memory in use, by all processes.",
    "temperature_celsius": "Temperature of the GPU.",
    "power_watts": "Power that the GPU draws.",
}


class _Families:
    """A collector, as the library expects it."""

    def __init__(self, *parts: Iterable[Metric]) -> None:
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        for part in self._parts:
            yield from part


async def render(context: ServiceContext, principal: Principal, requests: RequestMetrics) -> bytes:
    """Return Prometheus's text format, with the jobs and accounts that the principal may see."""
    async with context.database.read() as session:
        held = await leases(session)
        families = [
            *await _service(session, context),
            *await _jobs(session, principal, held),
            *_gpus(await devices_now(session, context, principal, held)),
            *await _accounts(session, principal),
        ]
    return generate_latest(_Families(families, requests.registry.collect()))


def _gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"pantheraml_{name}", text, labels=labels)


def _single(name: str, text: str, value: float | None) -> GaugeMetricFamily:
    found = _gauge(name, text)
    if value is not None:
        found.add_metric((), value)
    return found


async def _service(session: AsyncSession, context: ServiceContext) -> list[Metric]:
    build = _gauge("build_info", "Version of the service.", ("version",))
    build.add_metric((__version__,), 1)
    jobs = _gauge("jobs", "Jobs in each state, finished ones included.", ("state",))
    counted = dict.fromkeys(State, 0)
    for state, count in await session.execute(select(Job.state, func.count()).group_by(Job.state)):
        counted[State(state)] = count
    for state, count in counted.items():
        jobs.add_metric((state.value,), count)
    oldest = await session.scalar(select(func.min(Job.queued_at)).where(Job.state == State.QUEUED.value))
    waiting = 0.0 if oldest is None else max(0.0, time.time() - oldest)
    wanted = await session.scalar(select(func.sum(Job.processes)).where(Job.state.in_(_WANTING)))
    devices, host = context.dispatcher.inventory.devices, host_now(context)
    used_bytes = host.ram_used_bytes
    return [
        build,
        jobs,
        _single("devices", "GPUs, their shares, or CPU slots that jobs may have.", len(devices)),
        _single("devices_wanted", "Devices that jobs hold or wait for.", wanted or 0),
        _single("queue_jobs", "Jobs that wait for devices.", counted[State.QUEUED]),
        _single("queue_oldest_seconds", "How long the first of them waits; 0 if there is none.", waiting),
        _single("dispatcher_alive", "1 if jobs are started and watched, 0 if not.", float(context.dispatcher.is_alive)),
        _single("host_cpu_ratio", "Use of all cores, from 0 to 1.", _ratio(host.cpu_percent)),
        _single("host_memory_used_bytes", "Memory of the host in use.", used_bytes),
    ]


def _ratio(percent: float | None) -> float | None:
    return None if percent is None else percent / 100


async def _jobs(session: AsyncSession, principal: Principal, held: Mapping[str, Lease]) -> list[Metric]:
    info = _gauge("job_info", "Jobs that hold devices.", ("job_id", "user", "model", "state"))
    devices = _gauge("job_devices", "Devices that the job holds.", ("job_id",))
    step = _gauge("job_step", "Newest step.", ("job_id",))
    total = _gauge("job_total_steps", "Steps that the job will take.", ("job_id",))
    left = _gauge("job_left_seconds", "Seconds that are left, by the pace of the newest steps.", ("job_id",))
    moment = _gauge("job_last_step_timestamp_seconds", "When the newest step ended.", ("job_id",))
    alert = _gauge("job_alert", "Active alerts of the job.", ("job_id", "alert"))
    figures = {name: _gauge(f"job_{name}", text, ("job_id",)) for name, text in _OF_STEPS.items()}
    for job in await running_now(session, principal, held):
        info.add_metric((job.job, job.user, job.model, job.state), 1)
        for family, value in ((devices, len(job.devices)), (step, job.step), (total, job.total_steps)):
            _add(family, job, value)
        _add(left, job, job.seconds_left)
        for name in job.alerts:
            alert.add_metric((job.job, name.partition(".")[2]), 1)
        newest = select(Event).where(Event.job_id == job.job, Event.kind == "train.step")
        last = await session.scalar(newest.order_by(Event.id.desc()).limit(1))
        if last is not None:
            _add(moment, job, last.created_at)
            for name, family in figures.items():
                _add(family, job, last.data.get(name))
    return [info, devices, step, total, left, moment, alert, *figures.values()]


def _add(family: GaugeMetricFamily, job: RunningJob, value: Any) -> None:
    if isinstance(value, int | float):
        family.add_metric((job.job,), value)


def _gpus(devices: Iterable[DeviceStatus]) -> list[Metric]:
    labels = ("gpu", "name")
    utilization = _gauge("gpu_utilization_ratio", "Share of the time in which a kernel ran, from 0 to 1.", labels)
    in_use = _gauge("gpu_in_use", "1 if a job holds the GPU, 0 if not.", labels)
    health = _gauge("gpu_health", "0 ok, 1 warning, 2 failure.", labels)
    figures = {name: _gauge(f"gpu_{name}", text, labels) for name, text in _OF_GPUS.items()}
    for each in devices:
        if each.kind != "gpu":
            continue
        mark = (each.device.partition(":")[2], each.name or "")
        in_use.add_metric(mark, float(each.in_use))
        if each.utilization_percent is not None:
            utilization.add_metric(mark, each.utilization_percent / 100)
        if each.health is not None:
            health.add_metric(mark, _HEALTH[each.health])
        for name, family in figures.items():
            if (value := getattr(each, name)) is not None:
                family.add_metric(mark, value)
    return [utilization, in_use, health, *figures.values()]


async def _accounts(session: AsyncSession, principal: Principal) -> list[Metric]:
    """Counters, read from the database, so that a restart does not reset them."""
    seconds = CounterMetricFamily(
        "pantheraml_usage_device_seconds", "Seconds that jobs have held devices.", labels=("user", "device")
    )
    energy = CounterMetricFamily("pantheraml_usage_energy_joules", "Energy of GPUs that held jobs.", labels=("user",))
    for each in await used(session, start=None, end=time.time(), owner=principal.owner, by_job=False):
        for device, hours in (("gpu", each.gpu_hours), ("cpu", each.cpu_slot_hours)):
            if hours:
                seconds.add_metric((each.user, device), 3600 * hours)
        if each.energy_joules is not None:
            energy.add_metric((each.user,), each.energy_joules)
    return [seconds, energy]
