"""Alerts of a running job: it stalls, diverges, slows down, or holds a GPU that is not healthy.

    alert.stall            no progress for `stall_seconds`, or for ten times as long as a step takes
    alert.divergence       the mean loss of 20 steps is far above the lowest such mean, or is not finite
    alert.low_throughput   the median speed of 10 steps is below half of the best one; below a quarter
                           where two jobs share a GPU
    alert.gpu_health       a GPU that it holds warns or fails

Each emits an event when it begins and another when it ends (`data.active`). Alerts stop nothing; stopping a run is up
to its guard.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pantheraml.base.events import EventBase, GPUHealthChanged, HardwareSampled, TrainStarted, TrainStep
from pantheraml.devices.health import Health

PREFIX = "alert."
STALL, DIVERGENCE, SLOW, GPU_HEALTH = (
    f"{PREFIX}{name}" for name in ("stall", "divergence", "low_throughput", "gpu_health")
)

STALL_STEPS = 10.0
START_SECONDS = 1800.0
"""Seconds without progress before the first step: a large model may be read from a slow disk."""
LOSSES = 20
DIVERGED_BY, DIVERGED_SHARE = 0.5, 0.5
"""Divergence: the mean loss exceeds the lowest by this much and by this fraction of it."""
WARM_UP = 5
SPEEDS = 10
SLOW_SHARE, RECOVERED_SHARE = 0.5, 0.7


@dataclass(frozen=True)
class Alert:
    kind: str
    active: bool
    level: Literal["info", "warn", "error"]
    message: str
    data: dict[str, Any] = field(default_factory=dict)


class JobWatch:
    """Detects alerts in the events of one start of a job."""

    def __init__(self, now: float, stall_seconds: float, active: Iterable[str] = (), *, share: float = 1.0) -> None:
        """`active`: kinds of alerts that are active already; `share`: part of its GPUs that it has, so that it becomes
        slower by that when others start on them."""
        self._stall_seconds, self._share = stall_seconds, share
        self._active = set(active)
        self._alive_at, self._heard = now, False
        self._stepped_at: float | None = None
        self._intervals: deque[float] = deque(maxlen=LOSSES)
        self._losses: deque[float] = deque(maxlen=LOSSES)
        self._lowest = math.inf
        self._speeds: deque[float] = deque(maxlen=SPEEDS)
        self._best_speed = 0.0
        self._steps = 0

    def saw(self, event: EventBase, now: float) -> None:
        """`now`: when the event was read, since the run's host may have another clock."""
        if isinstance(event, HardwareSampled | GPUHealthChanged):
            return  # written by the supervisor, whatever the workers do
        self._alive_at, self._heard = now, True
        if isinstance(event, TrainStarted):
            self._stepped_at = None
        elif isinstance(event, TrainStep):
            self.saw_step(event.time, event.loss, event.tokens_per_second)

    def saw_step(self, moment: float, loss: float | None, speed: float | None) -> None:
        if self._stepped_at is not None and moment > self._stepped_at:
            self._intervals.append(moment - self._stepped_at)
        self._stepped_at = moment
        self._steps += 1
        self._losses.append(math.nan if loss is None else loss)
        if len(self._losses) == LOSSES and math.isfinite(mean := statistics.fmean(self._losses)):
            self._lowest = min(self._lowest, mean)
        if speed is not None and self._steps > WARM_UP:
            self._speeds.append(speed)
            if len(self._speeds) == SPEEDS:
                self._best_speed = max(self._best_speed, statistics.median(self._speeds))

    def judge(self, now: float, bad: Mapping[int, Health] | None) -> list[Alert]:
        """Return the changes. `bad`: unhealthy GPUs of the job; None: unknown."""
        found = [self._stall(now), self._divergence(), self._slow(), None if bad is None else self._gpus(bad)]
        changed = [each for each in found if each is not None and each.active is not (each.kind in self._active)]
        for each in changed:
            (self._active.add if each.active else self._active.discard)(each.kind)
        return changed

    def _stall(self, now: float) -> Alert | None:
        if STALL in self._active and not self._heard:
            return None  # it stalled before this service was started, and has not moved since
        allowed = START_SECONDS
        if self._stepped_at is not None:
            step = statistics.median(self._intervals) if self._intervals else 0.0
            allowed = max(self._stall_seconds, STALL_STEPS * step)
        silent = now - self._alive_at
        if silent <= allowed:
            return Alert(STALL, False, "info", "It moves again")
        what = "the model was started" if self._stepped_at is None else f"step {self._steps} of this start"
        return Alert(STALL, True, "error", f"No progress for {silent:.0f} s, since {what}", {"seconds": silent})

    def _divergence(self) -> Alert | None:
        if not self._losses:
            return None
        if not math.isfinite(self._losses[-1]):
            return Alert(DIVERGENCE, True, "error", "The training loss is not finite")
        finite = [loss for loss in self._losses if math.isfinite(loss)]
        mean, margin = statistics.fmean(finite), max(DIVERGED_BY, DIVERGED_SHARE * abs(self._lowest))
        if len(finite) < LOSSES or not math.isfinite(self._lowest):
            # too few losses; an alert about a NaN ends with finite ones
            return Alert(DIVERGENCE, False, "info", "The training loss is finite again")
        if mean > self._lowest + margin:
            message = f"The training loss has risen to {mean:.4g}, from {self._lowest:.4g} (means of {LOSSES} steps)"
            return Alert(DIVERGENCE, True, "error", message, {"mean_loss": mean, "lowest_mean_loss": self._lowest})
        if mean > self._lowest + margin / 2:
            return None  # hysteresis
        return Alert(DIVERGENCE, False, "info", f"The training loss is back at {mean:.4g}")

    def _slow(self) -> Alert | None:
        if len(self._speeds) < SPEEDS or not self._best_speed:
            return None
        speed = statistics.median(self._speeds)
        data = {"tokens_per_second": speed, "best_tokens_per_second": self._best_speed}
        best = self._share * self._best_speed
        if speed < SLOW_SHARE * best:
            message = f"Only {speed:,.0f} tokens per second; it was {self._best_speed:,.0f}"
            return Alert(SLOW, True, "warn", message, data)
        if speed < RECOVERED_SHARE * best:
            return None
        return Alert(SLOW, False, "info", f"{speed:,.0f} tokens per second again", data)

    def _gpus(self, bad: Mapping[int, Health]) -> Alert:
        if not bad:
            return Alert(GPU_HEALTH, False, "info", "Its GPUs are healthy again")
        told = "; ".join(f"GPU {index}: {', '.join(each.reasons)}" for index, each in sorted(bad.items()))
        failed = any(each.status == "fail" for each in bad.values())
        return Alert(GPU_HEALTH, True, "error" if failed else "warn", told, {"gpus": sorted(bad)})
