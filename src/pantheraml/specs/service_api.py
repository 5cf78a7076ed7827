"""What the service says of its machine, its queue and its costs: the same models for the service and for the client.

None: not known. Times are seconds since 1970. What belongs to other users has no names for those who are no
administrators.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Answer(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class DeviceStatus(_Answer):
    """A GPU or, on a machine without any, a slot for a CPU process."""

    device: str
    """`gpu:0`, ... or `cpu:0`, ..."""
    kind: Literal["gpu", "cpu"]
    name: str | None = None
    in_use: bool
    """A job of this service holds it."""
    job: str | None = None
    user: str | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    """By all processes of the machine."""
    utilization_percent: int | None = None
    temperature_celsius: int | None = None
    power_watts: float | None = None
    health: Literal["ok", "warn", "fail"] | None = None
    health_reasons: list[str] = []


class HostStatus(_Answer):
    cpu_count: int
    cpu_percent: float | None
    """Of all cores, over the last second."""
    ram_used_bytes: int | None
    ram_total_bytes: int | None
    driver: str | None
    note: str | None
    """Why there is no GPU; None if there are any."""


class QueueEntry(_Answer):
    """A job that waits for devices."""

    position: int
    """From 1."""
    job: str | None
    """None: another user's."""
    user: str | None
    model: str | None
    suffix: str | None = None
    """That its user gave it."""
    priority: int
    devices: int
    """How many it needs."""
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
    """That its user gave it."""
    state: str
    devices: list[str]
    started_at: int | None
    step: int | None
    total_steps: int | None
    progress: float | None
    """From 0 to 1."""
    epoch: float | None
    train_loss: float | None
    tokens_per_second: float | None
    seconds_left: float | None
    """By the pace of the newest steps."""
    alerts: list[str]
    """Kinds of the alerts that are on, such as `alert.stall`."""


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
    """What the key of this request may do."""
    host: HostStatus
    devices: list[DeviceStatus]
    queued: int
    """Jobs in the queue, those of other users and those that are not in `queue` among them."""
    queue: list[QueueEntry]
    """The first of them."""
    running: list[RunningJob]
    incidents: list[Incident]
    """The newest first."""


class UsageEntry(_Answer):
    """What a user, or one job, has used in a period."""

    user: str
    job: str | None
    """None: all jobs of the user."""
    model: str | None
    jobs: int
    starts: int
    gpu_hours: float
    cpu_slot_hours: float
    """On machines without GPUs."""
    energy_joules: float | None
    """Of the GPUs."""
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
