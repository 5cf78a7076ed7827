"""Selection of GPUs: health first, then free memory, then topology; always with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pantheraml.base.env import ProcessRank
from pantheraml.devices.fake_nvml import FakeNvml
from pantheraml.devices.health import Health
from pantheraml.devices.select import CandidateGPU, devices_for_run, fit_here, select, select_here
from pantheraml.planner.choose import choose
from pantheraml.specs.config_file import load_config, parse_overrides
from pantheraml.specs.train import TrainConfig

Host = Callable[..., FakeNvml]
GIB = 2**30


def gpu(index: int, *, free: int | None = 100, status: Any = "ok", reason: str = "broken") -> CandidateGPU:
    health = Health(status=status, reasons=() if status in ("ok", None) else (reason,))
    return CandidateGPU(index, 100 * GIB, None if free is None else free * GIB, health)


def config(*settings: str) -> TrainConfig:
    return load_config(None, parse_overrides(["model.path=m", "data.path=d", *settings]))


def test_all_that_are_fit() -> None:
    found = select([gpu(0), gpu(1, status=None), gpu(2, free=50), gpu(3, free=None)])
    assert found.indices == (0, 1, 2, 3)
    assert (found.reason, found.passed_over) == ("all 4 visible GPU(s) are healthy and free", {})


@pytest.mark.seed("S4-012", "S4-106")
def test_unhealthy_and_busy_ones_are_passed_over() -> None:
    found = select([gpu(0, status="fail"), gpu(1), gpu(2, free=49), gpu(3, status="warn")])
    assert found.indices == (1, 3)
    assert found.passed_over == {0: "broken", 2: "only 49 % of its memory is free"}
    assert found.reason == (
        "2 of 4 GPU(s) are healthy and free (GPU 0: broken; GPU 2: only 49 % of its memory is free)"
    )


def test_too_few_are_filled_up_with_the_best_others() -> None:
    candidates = [gpu(0, status="fail", free=100), gpu(1, free=20), gpu(2, free=40), gpu(3)]
    found = select(candidates, count=2)
    assert found.indices == (2, 3)
    assert found.reason == "too few of 4 GPU(s) are healthy and free, so GPU 2 is used, too"
    assert select(candidates, count=4).indices == (0, 1, 2, 3)
    assert select([gpu(0, free=10), gpu(1, free=5)]).indices == (0, 1), "a busy host is still used"


def test_one_gpu_is_the_freest() -> None:
    assert select([gpu(0, free=80), gpu(1, free=99), gpu(2, free=97)], count=1).indices == (1,)
    assert select([gpu(0, free=97), gpu(1, free=99)], count=1).indices == (0,), "a small difference is noise"
    assert select([gpu(0, status="warn"), gpu(1)], count=1).indices == (1,)


def test_the_nearest_ones_are_taken() -> None:
    pairs = {frozenset(pair): "NVLink" for pair in ((1, 2), (3, 0))} | {frozenset((1, 3)): "PCIe switch"}

    def connection(a: int, b: int) -> str:
        return pairs.get(frozenset((a, b)), "CPU interconnect")

    candidates = [gpu(index) for index in range(4)]
    found = select(candidates, count=2, connection=connection)
    assert found.indices == (0, 3)
    assert "by NVLink" in found.reason
    found = select([gpu(0, status="fail"), *candidates[1:]], count=2, connection=connection)
    assert found.indices == (1, 2)
    assert "GPU 0: broken" in found.reason
    assert select(candidates, count=3).indices == (0, 1, 2), "the first ones if nothing is known"


def test_groups_on_a_pcie_host(host: Host) -> None:
    fake = host("8xA100-80GB pcie")
    assert select_here(2).indices == (0, 1)
    assert select_here(4).indices == (0, 1, 2, 3)
    fake.gpus[1].ecc = (0, 1)
    assert select_here(2).indices == (2, 3), "one switch"
    assert select_here(4).indices == (4, 5, 6, 7), "one NUMA node"
    assert fake.open_sessions == 0


def test_available_gpus(host: Host) -> None:
    fake = host("4xH200")
    fake.gpus[2].used_bytes = 20 * GIB
    assert fit_here(free_share=0.5).indices == (0, 1, 2, 3)
    found = fit_here(free_share=0.9, among=[0, 2, 9])
    assert found.indices == (0,)
    assert found.passed_over[9] == "not visible"
    assert found.passed_over[1] == "not listed"
    assert "of its memory is free" in found.passed_over[2]
    host("cpu 4 cores")
    assert fit_here(free_share=0.9).indices == ()
    assert "no NVIDIA driver" in select_here().reason


def test_a_run_gets_the_selected_gpus_and_the_reason(host: Host) -> None:
    host("4xH200").gpus[1].ecc = (0, 3)
    devices = devices_for_run(config())
    assert [each.index for each in devices.gpus] == [0, 2, 3]
    plan = choose(config(), devices)
    assert (plan.world_size, plan.device_ids) == (3, (0, 2, 3))
    assert "GPU 1: 3 uncorrected ECC error(s)" in plan.reason("parallel.device_ids")


@pytest.mark.parametrize(
    ("settings", "indices"),
    [
        (["parallel.device_ids=0,1"], [0, 1, 2, 3]),  # as named, also those that are not fit
        (["model.device_map={layers: 'cuda:1', '': 'cuda:0'}"], [0, 1, 2, 3]),  # its numbers are positions
        (["device=cpu"], [0, 1, 2, 3]),
        (["parallel.world_size=2"], [0, 2]),
        (["parallel.mode=none"], [0]),
        (["parallel.mode=dataparallel"], [0, 2, 3]),
        (["parallel.world_size=4"], [0, 1, 2, 3]),  # as many as asked for, with a reason
        (["parallel.memory_fraction=0.99"], [0, 2]),
        (["parallel.world_size=9"], [0, 1, 2, 3]),  # an error of the planner
    ],
)
def test_what_a_run_asks_for(host: Host, settings: list[str], indices: list[int]) -> None:
    fake = host("4xH200")
    fake.gpus[1].remap = (0, 1)
    fake.gpus[3].used_bytes = 5 * GIB
    assert [each.index for each in devices_for_run(config(*settings)).gpus] == indices


def test_ranks_of_a_launcher_use_all_gpus(host: Host) -> None:
    host("2xH200").gpus[0].ecc = (0, 1)
    place = ProcessRank(rank=0, local_rank=0, world_size=2, local_world_size=2)
    devices = devices_for_run(config(), place)
    assert len(devices.gpus) == 2
    assert devices.selection is None
