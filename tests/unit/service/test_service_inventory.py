"""Which cores a job may use: equal shares for slots, so that jobs side by side do not take each other's."""

from __future__ import annotations

import pytest

from pantheraml.service.jobs.inventory import LeasableDevices
from pantheraml.specs.plan import GPU, DeviceSpec


def slots(count: int) -> LeasableDevices:
    return LeasableDevices(
        DeviceSpec(gpus=(), cpu_count=8, ram_bytes=1, driver=None), tuple(f"cpu:{i}" for i in range(count))
    )


@pytest.mark.parametrize(
    ("count", "shares"),
    [
        (2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (3, [[0, 1], [2, 3, 4], [5, 6, 7]]),
        (8, [[core] for core in range(8)]),
        (16, [[core] for core in range(8) for _ in range(2)]),
    ],
)
def test_every_slot_has_its_share_of_the_cores(count: int, shares: list[list[int]]) -> None:
    found = slots(count)
    assert [found.cores_of([name], range(8)) for name in found.devices] == shares
    assert found.cores_of(found.devices, range(8)) == list(range(8))


def test_cores_are_those_that_the_service_may_use() -> None:
    assert slots(2).cores_of(["cpu:1"], [3, 5, 9]) == [5, 9]


def test_jobs_on_gpus_share_all_cores() -> None:
    gpu = GPU(index=0, name="H200", total_bytes=1, free_bytes=1, compute_capability=(9, 0))
    spec = DeviceSpec(gpus=(gpu,), cpu_count=8, ram_bytes=1, driver="580")
    assert LeasableDevices(spec, ("gpu:0",)).cores_of(["gpu:0"], range(8)) is None
