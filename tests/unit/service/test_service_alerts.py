"""When an alert begins and ends, and what is no reason for one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from pantheraml.base import events
from pantheraml.devices.health import Health
from pantheraml.service.jobs.alerts import DIVERGENCE, GPU_HEALTH, LOSSES, SLOW, STALL, Alert, JobWatch

NOW = 1000.0


def run(watch: JobWatch, losses: Sequence[float], *, speed: float = 100.0, begin: float = NOW) -> list[Alert]:
    """Take a step of each loss every second; what was told meanwhile."""
    told = []
    for index, loss in enumerate(losses):
        moment = begin + index
        watch.saw(step(loss, moment, speed), moment)
        told += watch.judge(moment, {})
    return told


def step(loss: float, moment: float, speed: float) -> events.TrainStep:
    known = {"epoch": 1.0, "learning_rate": 0.1, "grad_norm": 1.0, "tokens": 3, "target_tokens": 2, "seconds": 1.0}
    return events.TrainStep(step=1, loss=loss, tokens_per_second=speed, memory_bytes=None, time=moment, rank=0, **known)


def kinds(alerts: list[Alert]) -> list[tuple[str, bool]]:
    return [(alert.kind, alert.active) for alert in alerts]


def test_a_run_that_learns_raises_nothing() -> None:
    watch = JobWatch(NOW, 60)
    falling = [2.0 * 0.99**n + 0.1 * math.sin(n) for n in range(300)]
    assert run(watch, falling) == []


def test_a_loss_that_rises() -> None:
    watch = JobWatch(NOW, 60)
    assert run(watch, [1.0] * 50) == []
    risen = run(watch, [3.0] * LOSSES, begin=NOW + 50)
    assert kinds(risen) == [(DIVERGENCE, True)]
    assert risen[0].message.startswith("The training loss has risen to ")
    assert kinds(run(watch, [1.3] * (2 * LOSSES), begin=NOW + 100)) == [], "it is lower, but not low"
    assert kinds(run(watch, [1.0] * (2 * LOSSES), begin=NOW + 200)) == [(DIVERGENCE, False)]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number(loss: float) -> None:
    watch = JobWatch(NOW, 60)
    assert kinds(run(watch, [1.0, loss])) == [(DIVERGENCE, True)]
    assert kinds(run(watch, [1.0], begin=NOW + 2)) == [(DIVERGENCE, False)]


def test_a_stall_begins_and_ends_once() -> None:
    watch = JobWatch(NOW, 60)
    run(watch, [1.0] * 5)
    last = NOW + 4
    assert watch.judge(last + 59, {}) == []
    (stalled,) = watch.judge(last + 61, {})
    assert (stalled.kind, stalled.active, stalled.level) == (STALL, True, "error")
    assert watch.judge(last + 90, {}) == []
    watch.saw(events.HardwareSampled(seconds=1, samples=1, cpu_percent=None, ram_bytes=0), last + 91)
    assert watch.judge(last + 91, {}) == [], "the supervisor lives, which says nothing of the workers"
    watch.saw(events.Heartbeat(step=5), last + 92)
    assert kinds(watch.judge(last + 92, {})) == [(STALL, False)]


def test_long_steps_are_no_stall() -> None:
    watch = JobWatch(NOW, 60)
    for index in range(5):
        watch.saw(step(1.0, NOW + 100 * index, 10.0), NOW + 100 * index)
    assert watch.judge(NOW + 400 + 900, {}) == []
    assert kinds(watch.judge(NOW + 400 + 1001, {})) == [(STALL, True)]


def test_a_model_takes_its_time_to_load() -> None:
    watch = JobWatch(NOW, 60)
    assert watch.judge(NOW + 1700, {}) == []
    assert kinds(watch.judge(NOW + 1900, {})) == [(STALL, True)]


def test_a_run_that_slows_down() -> None:
    watch = JobWatch(NOW, 60)
    assert run(watch, [1.0] * 5, speed=1.0) == [], "the first steps compile"
    assert run(watch, [1.0] * 20, speed=100.0, begin=NOW + 5) == []
    slow = run(watch, [1.0] * 10, speed=40.0, begin=NOW + 25)
    assert kinds(slow) == [(SLOW, True)]
    assert slow[0].message == "Only 40 tokens per second; it was 100"
    assert run(watch, [1.0] * 10, speed=60.0, begin=NOW + 40) == []
    assert kinds(run(watch, [1.0] * 10, speed=90.0, begin=NOW + 60)) == [(SLOW, False)]
    shared = JobWatch(NOW, 60, share=0.5)
    run(shared, [1.0] * 20, speed=100.0)
    assert run(shared, [1.0] * 10, speed=40.0, begin=NOW + 25) == [], "another job has started on its GPU"
    assert kinds(run(shared, [1.0] * 10, speed=20.0, begin=NOW + 60)) == [(SLOW, True)]


@pytest.mark.seed("S4-119")
def test_a_gpu_that_is_not_healthy() -> None:
    watch = JobWatch(NOW, 60)
    failed = Health(status="fail", reasons=("3 uncorrected ECC error(s)",))
    (alert,) = watch.judge(NOW, {1: failed})
    assert (alert.kind, alert.level, alert.message) == (GPU_HEALTH, "error", "GPU 1: 3 uncorrected ECC error(s)")
    assert watch.judge(NOW, {1: failed}) == []
    assert watch.judge(NOW, None) == [], "it is not known"
    assert kinds(watch.judge(NOW, {})) == [(GPU_HEALTH, False)]


def test_an_alert_is_not_told_again_after_a_restart() -> None:
    watch = JobWatch(NOW, 60, active=[STALL])
    assert watch.judge(NOW, None) == watch.judge(NOW + 3600, None) == []
    watch.saw(events.Heartbeat(step=5), NOW + 3600)
    assert kinds(watch.judge(NOW + 3600, None)) == [(STALL, False)]
