"""Sample GPUs and host in a thread of their own: at most once a second, and for at most a thousandth of a core.

The last ten minutes are kept in a ring buffer. The thread measures its own CPU time and samples less often where it
would exceed its share, so the limit holds on any host. Health is read every half minute, critical errors (Xids) with
every sample.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from pantheraml.base import log
from pantheraml.devices.health import Health, HealthWatch, read_health
from pantheraml.devices.sampler import GPUSampler, GPUSnapshot

logger = log.get(__name__)

PERIOD_SECONDS = 1.0
CPU_SHARE = 0.001
CAPACITY = 600
HEALTH_SECONDS = 30.0
CREDIT_SECONDS = 60.0
"""Seconds whose CPU share may be spent in advance: the first sample opens NVML and reads health."""
JOIN_SECONDS = 5.0
"""A driver may hang in a call; the thread is then left to the end of the process."""


@dataclass(frozen=True)
class HostSample:
    """GPUs and host at one moment."""

    clock: float
    """Time by the monotonic clock."""
    cpu_percent: float | None
    """CPU use of all cores since the previous sample; None in the first."""
    ram_used_bytes: int
    ram_total_bytes: int
    gpus: tuple[GPUSnapshot, ...]


class BackgroundSampler:
    """Use it in a `with` block, or call `start` and `stop`."""

    def __init__(
        self,
        indices: Sequence[int] | None = None,
        *,
        period: float = PERIOD_SECONDS,
        cpu_share: float = CPU_SHARE,
        capacity: int = CAPACITY,
        health_seconds: float = HEALTH_SECONDS,
    ) -> None:
        """`indices`: GPUs to sample; None: all visible ones, none if empty."""
        self._indices, self._period, self._cpu_share = indices, period, cpu_share
        self._health_seconds = health_seconds
        self._samples: deque[HostSample] = deque(maxlen=capacity)
        self._health: dict[int, Health] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.taken = 0
        self.cpu_seconds = 0.0
        """CPU time of the thread so far."""

    def start(self) -> BackgroundSampler:
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name="gpu-sampler", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)
            self._thread = None

    def __enter__(self) -> BackgroundSampler:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def samples(self, *, after: float = float("-inf")) -> list[HostSample]:
        """Return the kept samples with a later `clock`, oldest first."""
        with self._lock:
            found = []
            for sample in reversed(self._samples):
                if sample.clock <= after:
                    break
                found.append(sample)
        return found[::-1]

    def health(self) -> dict[int, Health]:
        """Return the newest judgement of each GPU."""
        with self._lock:
            return dict(self._health)

    def _run(self) -> None:
        try:
            began = time.monotonic()
            with _Readings(self._indices, self._health_seconds) as readings:
                while not self._stopping.is_set():
                    self._take(readings)
                    self.cpu_seconds = time.thread_time()
                    ahead = self.cpu_seconds / self._cpu_share - (time.monotonic() - began) - CREDIT_SECONDS
                    self._stopping.wait(max(self._period, ahead))
        except Exception as err:  # noqa: BLE001 - telemetry must not end a run, whatever a driver does
            logger.warning("GPUs and host are no longer sampled: %s: %s", type(err).__name__, err)

    def _take(self, readings: _Readings) -> None:
        sample, health = readings.take()
        with self._lock:
            self._samples.append(sample)
            self.taken += 1
            self._health |= health


class _Readings:
    """State that the thread keeps between samples."""

    def __init__(self, indices: Sequence[int] | None, health_seconds: float) -> None:
        self._sampler, self._health_seconds = GPUSampler(indices), health_seconds
        self._watches = [HealthWatch() for _ in self._sampler.visible]
        session = self._sampler.session
        gpus = [each.gpu for each in self._sampler.visible]
        self._xids = session.watch_xids(gpus) if session is not None and gpus else None
        self._uuids = {gpu.uuid(): watch for gpu, watch in zip(gpus, self._watches, strict=True)}
        self._health_due = float("-inf")
        self._cpu: tuple[float, float] | None = None
        """Busy and total seconds of all cores."""

    def __enter__(self) -> _Readings:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(self) -> tuple[HostSample, dict[int, Health]]:
        now, memory = time.monotonic(), psutil.virtual_memory()
        snapshots = self._sampler.take(everything=True)
        sample = HostSample(now, self._cpu_percent(), memory.total - memory.available, memory.total, tuple(snapshots))
        return sample, self._health(snapshots, now)

    def _health(self, snapshots: Sequence[GPUSnapshot], now: float) -> dict[int, Health]:
        """Check all GPUs if it is time, or only those with news."""
        changed = set()
        for uuid, number in self._xids.poll() if self._xids is not None else ():
            if (watch := self._uuids.get(uuid)) is not None:
                watch.saw_xid(number)
                changed.add(watch)
        due = now >= self._health_due
        if due:
            self._health_due = now + self._health_seconds
        judged = {}
        for visible, watch, snapshot in zip(self._sampler.visible, self._watches, snapshots, strict=True):
            if due:
                watch.add(read_health(visible.gpu), at=now)
            watch.saw_reasons(snapshot.event_reasons or (), at=now)
            if due or watch in changed:
                judged[visible.index] = watch.judge()
        return judged

    def close(self) -> None:
        if self._xids is not None:
            self._xids.close()
        self._sampler.close()

    def _cpu_percent(self) -> float | None:
        times = psutil.cpu_times()
        # guest time is part of user time, iowait is idle
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        busy = total - times.idle - getattr(times, "iowait", 0.0)
        before, self._cpu = self._cpu, (busy, total)
        if before is None or total <= before[1]:
            return None
        return min(100.0, max(0.0, 100 * (busy - before[0]) / (total - before[1])))


def take_once(indices: Sequence[int] | None = None) -> HostSample:
    """Read GPUs and host once; what needs two readings is None."""
    sampler = GPUSampler(indices)
    try:
        memory = psutil.virtual_memory()
        gpus = tuple(sampler.take(everything=True))
        return HostSample(time.monotonic(), None, memory.total - memory.available, memory.total, gpus)
    finally:
        sampler.close()
