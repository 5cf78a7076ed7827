"""Response models for machine, queue and costs, shared by the service and its client.

None: not known. Times are seconds since 1970. What belongs to other users is anonymous, except for administrators.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Answer(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class DeviceHolder(_Answer):
    """A job on a device; None: another user's."""

    job: str | None
    user: str | None


class DeviceStatus(_Answer):
    """A GPU or, on a machine without any, a slot for a CPU process."""

    device: str
    """`gpu:0`, ... or `cpu:0`, ..."""
    kind: Literal["gpu", "cpu"]
    name: str | None = None
    in_use: bool
    """Whether a job of this service holds it."""
    jobs_at_most: int = 1
    """Jobs that may share it."""
    holders: list[DeviceHolder] = []
    job: str | None = None
    """The first job that you may see."""
    user: str | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    """Memory used by all processes of the machine."""
    utilization_percent: int | None = None
    temperature_celsius: int | None = None
    power_watts: float | None = None
    health: Literal["ok", "warn", "fail"] | None = None
    health_reasons: list[str] = []


class HostStatus(_Answer):
    cpu_count: int
    cpu_percent: float | None
    """CPU use of all cores over the last second."""
    ram_used_bytes: int | None
    ram_total_bytes: int | None
    driver: str | None
    note: str | None
    """Why there is no GPU; None if there are any."""


class QueueEntry(_Answer):
    """A job that waits for devices."""

    position: int
    """Position from 1."""
    job: str | None
    """None: another user's."""
    user: str | None
    model: str | None
    suffix: str | None = None
    """Name given by its user."""
    priority: int
    devices: int
    """Number of devices that it needs."""
    waiting_reason: str
    estimated_start: int | None
    queued_at: int | None


class Devices(_Answer):
    object: Literal["list"] = "list"
    host: HostStatus
    data: list[DeviceStatus]


class Queue(_Answer):
    object: Literal["list"] = "list"
    data: list[QueueEntry]
    has_more: bool = False


class RunningJob(_Answer):
    job: str
    user: str
    model: str
    suffix: str | None = None
    """Name given by its user."""
    state: str
    devices: list[str]
    started_at: int | None
    step: int | None
    total_steps: int | None
    progress: float | None
    """Progress from 0 to 1."""
    epoch: float | None
    train_loss: float | None
    tokens_per_second: float | None
    seconds_left: float | None
    """Seconds left, by the pace of the newest steps."""
    alerts: list[str]
    """Kinds of active alerts, such as `alert.stall`."""


class Incident(_Answer):
    """An event of a job that is a warning or an error."""

    id: str
    job: str
    model: str
    suffix: str | None
    created_at: int
    level: str
    kind: str
    message: str
    step: int | None


class Overview(_Answer):
    object: Literal["overview"] = "overview"
    version: str
    time: float
    user: str
    scopes: list[str]
    """Scopes of the key of this request."""
    host: HostStatus
    devices: list[DeviceStatus]
    queued: int
    """Length of the queue, including other users' jobs and those not listed in `queue`."""
    queue: list[QueueEntry]
    """First jobs of the queue."""
    running: list[RunningJob]
    incidents: list[Incident]
    """Newest first."""


class UsageEntry(_Answer):
    """Usage of a user, or of one job, in a period."""

    user: str
    job: str | None
    """None: all jobs of the user."""
    model: str | None
    jobs: int
    starts: int
    gpu_hours: float
    cpu_slot_hours: float
    """Hours of CPU slots, on machines without GPUs."""
    energy_joules: float | None
    """Energy of the GPUs."""
    cost: float | None
    """None unless the service was started with a price."""


class UsageReport(_Answer):
    object: Literal["usage"] = "usage"
    start: float | None
    end: float
    group_by: Literal["user", "job"]
    price_per_gpu_hour: float | None
    data: list[UsageEntry]
    has_more: bool = False
