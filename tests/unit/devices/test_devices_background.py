"""The background sampler: a ring of samples, its share of a core, health and Xids, and that it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from pantheraml.devices import background
from pantheraml.devices.background import BackgroundSampler, take_once
from pantheraml.devices.fake_nvml import FakeNvml

Host = Callable[..., FakeNvml]

FAST = {"period": 0.005, "cpu_share": 1.0}


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.seed("S4-011")
def test_samples_of_gpus_and_host(host: Host) -> None:
    fake = host("2xH200")
    with BackgroundSampler(**FAST) as sampler:
        until(lambda: sampler.taken >= 3)
        fake.gpus[1].utilization = 80
        until(lambda: sampler.samples()[-1].gpus[1].utilization_percent == 80)
    samples = sampler.samples()
    assert samples[0].cpu_percent is None
    assert [gpu.index for gpu in samples[0].gpus] == [0, 1]
    assert 0 < samples[-1].ram_used_bytes < samples[-1].ram_total_bytes
    assert [sample.clock for sample in samples] == sorted(sample.clock for sample in samples)
    assert sampler.samples(after=samples[1].clock) == samples[2:]
    assert fake.open_sessions == 0
    assert not any(thread.name == "gpu-sampler" for thread in threading.enumerate())


def test_cpu_load_is_a_percentage(host: Host) -> None:
    host("cpu 4 cores")
    with BackgroundSampler(period=0.05, cpu_share=1.0) as sampler:
        until(lambda: sampler.taken >= 4)
    loads = [sample.cpu_percent for sample in sampler.samples()]
    known = [load for load in loads if load is not None]
    assert known
    assert all(0 <= load <= 100 for load in known)
    assert all(sample.gpus == () for sample in sampler.samples())


def test_the_ring_keeps_the_newest(host: Host) -> None:
    host("1xH200")
    with BackgroundSampler(**FAST, capacity=5) as sampler:
        until(lambda: sampler.taken >= 12)
    assert len(sampler.samples()) == 5


def test_only_the_given_gpus_are_asked(host: Host) -> None:
    fake = host("8xH200")
    with BackgroundSampler((6, 2), **FAST) as sampler:
        until(lambda: sampler.taken)
    assert [gpu.index for gpu in sampler.samples()[0].gpus] == [2, 6]
    with BackgroundSampler((), **FAST) as sampler:
        until(lambda: sampler.taken)
    assert sampler.samples()[0].gpus == ()
    assert fake.open_sessions == 0


def test_it_waits_when_its_share_of_a_core_is_spent(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host("8xH200")
    monkeypatch.setattr(background, "CREDIT_SECONDS", 0.0)
    with BackgroundSampler(period=0.001, cpu_share=0.01) as sampler:
        began = time.monotonic()
        until(lambda: sampler.taken >= 4)
        elapsed = time.monotonic() - began
    # it checks after each sample, so that the newest may exceed the share
    assert sampler.cpu_seconds * 3 / 5 < 0.01 * elapsed
    assert sampler.taken < 200


def test_stopping_does_not_wait_for_the_next_sample(host: Host) -> None:
    host("1xH200")
    sampler = BackgroundSampler(period=1000.0).start()
    until(lambda: sampler.taken)
    began = time.monotonic()
    sampler.stop()
    assert time.monotonic() - began < 5
    sampler.stop()


def test_health_and_critical_errors(host: Host) -> None:
    fake = host("2xH200")
    fake.gpus[0].ecc = (0, 1)
    with BackgroundSampler(**FAST) as sampler:
        until(sampler.health)
        assert {index: health.status for index, health in sampler.health().items()} == {0: "fail", 1: "ok"}
        fake.gpus[1].xids += [13, 79]  # of an application, and of the hardware
        until(lambda: sampler.health()[1].status == "fail")
    assert sampler.health()[1].reasons == ("Xid 79: the GPU is off the bus: reboot the node",)


def test_health_is_read_less_often_than_samples(host: Host) -> None:
    fake = host("1xH200")
    with BackgroundSampler(**FAST) as sampler:
        until(lambda: sampler.taken >= 10)
    assert fake.calls["nvmlDeviceGetMarginTemperature"] == 1
    with BackgroundSampler(**FAST, health_seconds=0.0) as sampler:
        until(lambda: sampler.taken >= 10)
    assert fake.calls["nvmlDeviceGetMarginTemperature"] > 10


def test_an_error_ends_sampling_and_nothing_else(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = host("1xH200")
    with BackgroundSampler(**FAST) as sampler:
        until(lambda: sampler.taken)
        fake.gpus[0].temperature = None  # type: ignore[assignment]
        fake.gpus[0].energy_mj = "broken"  # type: ignore[assignment]
        until(lambda: "no longer sampled" in caplog.text)
    assert sampler.samples()
    assert fake.open_sessions == 0


def test_a_single_reading(host: Host) -> None:
    fake = host("2xH200")
    sample = take_once((1,))
    assert [gpu.index for gpu in sample.gpus] == [1]
    assert sample.gpus[0].power_watts == 76.0
    assert sample.cpu_percent is None
    assert fake.open_sessions == 0
