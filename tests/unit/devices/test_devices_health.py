"""Health: every row of the table of thresholds, at its limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pynvml
import pytest

from pantheraml.devices.fake_nvml import FakeNvml
from pantheraml.devices.health import (
    APPLICATION_XIDS,
    XIDS,
    Health,
    HealthReading,
    HealthWatch,
    judge_once,
    read_health,
)
from pantheraml.devices.nvml import Nvml

Host = Callable[..., FakeNvml]

WELL = HealthReading(
    recovery_action=0,
    remap_pending=False,
    remap_failed=False,
    ecc_corrected=7,
    ecc_uncorrected=0,
    thermal_margin=40,
    slowdown=(),
    links_active=17,
    links_inactive=0,
    link_errors=0,
)


def judged(*readings: HealthReading) -> Health:
    watch = HealthWatch()
    for number, reading in enumerate(readings):
        watch.add(reading, at=30.0 * number)
    return watch.judge()


def test_a_well_gpu_is_ok_without_reasons() -> None:
    assert judged(WELL) == Health(status="ok")


def test_what_the_driver_does_not_tell_is_not_ok() -> None:
    assert judged(HealthReading()) == Health(status=None)
    assert judged(HealthReading(thermal_margin=30)).status == "ok"


@pytest.mark.seed("S4-016", "S4-119")
@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"recovery_action": 1}, "fail", "reset the GPU"),
        ({"recovery_action": 2}, "fail", "reboot the node"),
        ({"recovery_action": 99}, "fail", "recovery action 99"),
        ({"remap_pending": True}, "warn", "pending"),
        ({"remap_failed": True}, "fail", "failed"),
        ({"ecc_uncorrected": 1}, "fail", "1 uncorrected ECC error(s)"),
        ({"thermal_margin": 6}, "ok", None),
        ({"thermal_margin": 5}, "warn", "5 °C below"),
        ({"thermal_margin": 1}, "warn", "1 °C below"),
        ({"thermal_margin": 0}, "fail", "0 °C above"),
        ({"thermal_margin": -3}, "fail", "3 °C above"),
        ({"slowdown": ("hardware thermal slowdown",)}, "warn", "hardware thermal slowdown"),
        ({"links_inactive": 1}, "fail", "1 inactive NVLink(s)"),
        ({"links_inactive": 18, "links_active": 0}, "ok", None),  # alone in its host, or without a bridge
        ({"link_errors": 12}, "warn", "12 NVLink CRC or replay error(s)"),
        ({"unusable": "the driver has lost the GPU"}, "fail", "lost"),
    ],
)
def test_each_signal(change: dict[str, object], status: str, says: str | None) -> None:
    found = judged(replace(WELL, **change))  # type: ignore[arg-type]
    assert found.status == status
    assert [says in reason for reason in found.reasons] == ([] if says is None else [True])


def test_corrected_errors_count_when_they_rise() -> None:
    assert judged(WELL, WELL).status == "ok"
    found = judged(WELL, replace(WELL, ecc_corrected=9))
    assert (found.status, found.reasons) == ("warn", ("2 new corrected ECC error(s)",))


def test_failures_come_before_warnings() -> None:
    found = judged(replace(WELL, remap_pending=True, link_errors=1, ecc_uncorrected=2))
    assert found.status == "fail"
    assert len(found.reasons) == 3
    assert "uncorrected" in found.reasons[0]


def test_slowdown_in_six_of_ten_minutes_fails() -> None:
    watch = HealthWatch()
    for minute in range(6):
        watch.add(WELL, at=60.0 * minute)
        assert watch.judge().status == ("ok" if minute == 0 else "warn")
        for second in (1, 20, 40):  # three times in the same minute count once
            watch.saw_reasons(("hardware slowdown", "software power cap"), at=60.0 * minute + second)
    found = watch.judge()
    assert (found.status, found.reasons) == ("fail", ("hardware slowdown in 6 of the last 10 minutes",))
    watch.add(WELL, at=60.0 * 10)
    assert watch.judge().status == "warn", "the first of them is ten minutes ago"
    watch.add(WELL, at=60.0 * 15)
    assert watch.judge().status == "ok"


def test_a_software_power_cap_is_normal() -> None:
    watch = HealthWatch()
    watch.add(WELL, at=0.0)
    for minute in range(20):
        watch.saw_reasons(("software power cap", "software thermal slowdown", "idle"), at=60.0 * minute)
    assert watch.judge().status == "ok"


@pytest.mark.parametrize("number", sorted(XIDS))
def test_critical_errors_of_the_hardware_fail(number: int) -> None:
    watch = HealthWatch()
    watch.add(WELL, at=0.0)
    watch.saw_xid(number)
    watch.add(WELL, at=30.0)
    found = watch.judge()
    assert (found.status, found.reasons) == ("fail", (f"Xid {number}: {XIDS[number]}",))


def test_other_critical_errors() -> None:
    assert sorted(APPLICATION_XIDS) == [13, 31, 43, 45, 68, 109]
    watch = HealthWatch()
    watch.add(WELL, at=0.0)
    for number in APPLICATION_XIDS:
        watch.saw_xid(number)
    assert watch.judge().status == "ok"
    watch.saw_xid(63)
    assert watch.judge() == Health(status="warn", reasons=("Xid 63",))


@pytest.mark.parametrize(
    ("attribute", "value", "status"),
    [
        ("recovery_action", 4, "fail"),
        ("remap", (1, 0), "warn"),
        ("remap", (0, 1), "fail"),
        ("ecc", (5, 0), "ok"),
        ("ecc", (5, 1), "fail"),
        ("temperature", 83, "warn"),
        ("temperature", 87, "fail"),
        ("reasons", 0x80, "warn"),
        ("reasons", 0x4, "ok"),
        ("inactive_links", 1, "fail"),
        ("inactive_links", 18, "ok"),
        ("link_errors", 3, "warn"),
        ("lost", pynvml.NVML_ERROR_RESET_REQUIRED, "fail"),
    ],
)
def test_it_is_read_from_the_driver(host: Host, attribute: str, value: object, status: str) -> None:
    fake = host("2xH200")
    setattr(fake.gpus[1], attribute, value)
    with Nvml() as session:
        first, second = session.devices()
        assert judge_once(first).status == "ok"
        assert judge_once(second).status == status


def test_a_gpu_lost_while_it_is_watched(host: Host) -> None:
    fake = host("1xH200")
    with Nvml() as session:
        (device,) = session.devices()
        assert read_health(device).unusable is None
        fake.gpus[0].lost = pynvml.NVML_ERROR_GPU_IS_LOST
        assert judge_once(device) == Health(status="fail", reasons=("the driver has lost the GPU",))
