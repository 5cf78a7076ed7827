"""GPUConfig, GPUMonitor and the contexts, with the code blocks of the product document changed in their imports."""

from __future__ import annotations

import asyncio
import logging
import re
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.errors import ConfigError, DeviceError
from pantheraml.devices.fake_nvml import FakeNvml
from pantheraml.gpu_monitor import GPUConfig, GPUMonitor, gpu_monitoring_context, performance_context
from pantheraml.specs.multi_gpu import MultiGPUMode
from tests import seed_blocks

Host = Callable[..., FakeNvml]
GIB = 2**30
PAGE = Path(__file__).parents[2] / "docs/gpus.md"


def run(block: str, **names: Any) -> dict[str, Any]:
    exec(compile(textwrap.dedent(block), "block", "exec"), names)
    return names


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, logger="pantheraml")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.seed("S4:98", "S4-012", "S4-016", "S4-057", "S4-058", "S4-059", "S4-060")
def test_gpu_monitor(host: Host) -> None:
    host("4xH200").gpus[2].ecc = (0, 1)
    found = seed_blocks.run("S4:98", GPUMonitor=GPUMonitor, gpu_config=GPUConfig())
    assert [gpu["id"] for gpu in found["gpu_info"]] == [0, 1, 2, 3]
    assert found["available_gpus"] == [0, 1, 3]
    assert found["gpu_stats"]["gpu_id"] == 0


@pytest.mark.seed("S4:266", "S4-014", "S4-015", "S4-061", "S4-062", "S4-063", "S4-108")
def test_gpu_monitoring(host: Host, capsys: pytest.CaptureFixture[str], logged: Callable[[], list[str]]) -> None:
    gpu = host("1xH200").gpus[0]
    gpu.utilization, gpu.used_bytes, gpu.temperature, gpu.power_watts = 93, gpu.total_bytes // 4, 61, 612.3
    found = seed_blocks.run("S4:266", GPUConfig=GPUConfig)
    assert capsys.readouterr().out == "GPU 0: Memory 25.0%, GPU 93.0%\n"
    assert (found["gpu_stats"]["temperature"], found["gpu_stats"]["power"]) == (61, 612.3)
    assert found["available_gpus"] == [], "a quarter is used, and memory_fraction asks for nine tenths"
    assert "Training start: GPU 0: load 93 %, memory 25 %, 61 °C, 612 W" in logged()


@pytest.mark.seed("S4-021", "S4-066", "S4-067")
def test_performance_monitoring(host: Host, logged: Callable[[], list[str]]) -> None:
    """Block S4:284 without its first part, which is the service's; its `async with` stands in a function."""
    fake = host("4xH200")
    found = run(
        """
        import asyncio
        from pantheraml.multigpu import gpu_monitoring_context, performance_context

        async def main():
            # Monitor training progress
            async with performance_context("multi_gpu_training"):
                # Training operations
                pass

        asyncio.run(main())

        # GPU monitoring context
        with gpu_monitoring_context([0, 1, 2, 3]):
            # GPU-intensive operations
            pass
        """
    )
    assert found
    messages = logged()
    assert [message for message in messages if message.startswith("multi_gpu_training: GPU 3: load 0 %")]
    assert [message for message in messages if message.startswith("GPU monitoring: GPU 0: load 0 %")]
    assert fake.open_sessions == 0


class TestMonitor:
    def test_what_it_tells_of_a_gpu(self, host: Host) -> None:
        host("2xH200").gpus[1].remap = (1, 0)
        info = GPUMonitor(GPUConfig(gpu_ids=[1])).get_gpu_info()
        assert len(info) == 1
        assert (info[0]["id"], info[0]["name"], info[0]["health"]) == (1, "NVIDIA H200", "warn")
        assert info[0]["used_bytes"] == info[0]["total_bytes"] - info[0]["free_bytes"] == 600 * 2**20
        assert info[0]["health_reasons"] == ["remapping of a memory row is pending: reset the GPU when it is idle"]

    def test_available_ones_are_chosen_with_a_reason(self, host: Host, logged: Callable[[], list[str]]) -> None:
        host("4xH200").gpus[0].used_bytes = 60 * GIB
        assert GPUMonitor(GPUConfig(memory_fraction=0.5)).get_available_gpus() == [0, 1, 2, 3]
        assert GPUMonitor(GPUConfig(gpu_ids=[0, 2])).get_available_gpus() == [2]
        assert "available GPUs: [2]" in logged()[-1]
        assert "GPU 0: only 57 % of its memory is free" in logged()[-1]
        selection = GPUMonitor(GPUConfig(use_multi_gpu=False)).select_gpus()
        assert (selection.indices, selection.reason) == ((1,), "use_multi_gpu is False")
        assert selection.passed_over[2] == "use_multi_gpu is False"

    def test_a_gpu_that_is_not_there(self, host: Host) -> None:
        host("2xH200")
        with pytest.raises(DeviceError, match=r"no GPU 5: visible are \[0, 1\]"):
            GPUMonitor().monitor_gpu_usage(gpu_id=5)
        with pytest.raises(DeviceError, match="no GPU 7"):
            GPUMonitor(GPUConfig(gpu_ids=[0, 7])).get_gpu_info()

    def test_a_host_without_gpus(self, host: Host, logged: Callable[[], list[str]]) -> None:
        host("cpu 4 cores")
        monitor = GPUMonitor()
        assert monitor.get_gpu_info() == []
        assert monitor.get_available_gpus() == []
        monitor.log_gpu_stats("start")
        assert logged()[-1].startswith("start: no GPU; RAM ")
        with pytest.raises(DeviceError, match="no NVIDIA driver"):
            monitor.monitor_gpu_usage()

    def test_what_the_driver_does_not_tell_is_none(self, host: Host, logged: Callable[[], list[str]]) -> None:
        host("1xH200").gpus[0].mig = [("MIG-1", 70 * GIB)]
        usage = GPUMonitor().monitor_gpu_usage()
        assert (usage["gpu_utilization"], usage["memory_utilization"]) == (None, 0.0)
        GPUMonitor().log_gpu_stats()
        assert logged()[-1] == "GPU 0: memory 0 %, 34 °C, 76 W"


class TestContexts:
    def test_what_a_block_used(self, host: Host) -> None:
        fake = host("3xH200")
        with gpu_monitoring_context([0, 2]) as usage:
            gpu = fake.gpus[2]
            gpu.used_bytes, gpu.temperature, gpu.power_watts = 90 * GIB, 70, 676.0
            gpu.energy_mj += 5_000
        assert sorted(usage.gpus) == [0, 2]
        found = usage.gpus[2]
        assert (found.memory_bytes, found.temperature_celsius, found.energy_joules) == (90 * GIB, 70, 5.0)
        assert found.power_watts is not None
        assert 76 < found.power_watts < 676
        assert usage.gpus[0].energy_joules == 0.0
        assert 0 < usage.seconds < 60
        assert not any(thread.name == "gpu-sampler" for thread in threading.enumerate())

    def test_it_ends_with_an_error_of_the_block(self, host: Host) -> None:
        fake = host("1xH200")
        with pytest.raises(ZeroDivisionError), gpu_monitoring_context() as usage:
            1 / 0  # noqa: B018
        assert list(usage.gpus) == [0]
        assert fake.open_sessions == 0

    def test_gpus_that_are_not_there_are_named(self, host: Host, logged: Callable[[], list[str]]) -> None:
        host("2xH200")
        with gpu_monitoring_context([0, 1, 2, 3]) as usage:
            pass
        assert sorted(usage.gpus) == [0, 1]
        assert "GPU 2, 3 cannot be monitored: not visible here" in logged()

    def test_asynchronous_blocks(self, host: Host) -> None:
        host("cpu 4 cores")

        async def main() -> Any:
            async with performance_context("work") as usage:
                await asyncio.sleep(0.01)
            return usage

        usage = asyncio.run(main())
        assert (usage.name, usage.gpus) == ("work", {})
        assert usage.seconds >= 0.01


def test_the_page_runs(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    host("2xH200")
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    run(block)
    assert capsys.readouterr().out.splitlines()[1:] == ["[0, 1]", "0 0.0 0.0", "1 0.0 0.0"]


def test_gpu_config_names_its_page() -> None:
    with pytest.raises(ConfigError, match="greater than 0") as caught:
        GPUConfig(memory_fraction=0)
    assert caught.value.fix == "See docs/own-loop.md."


@pytest.mark.seed(
    *("S4-096", "S4-097", "S4-098", "S4-099", "S4-100", "S4-101", "S4-102", "S4-103", "S4-104", "S4-105"),
)
def test_gpu_config_defaults() -> None:
    assert GPUConfig().model_dump() == {
        "use_multi_gpu": True,
        "gpu_ids": [],
        "distributed_training": False,
        "backend": "nccl",
        "batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
        "sync_batch_norm": True,
        "mixed_precision": True,
        "memory_fraction": 0.9,
    }


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"memory_fraction": 0}, "memory_fraction"),
        ({"memory_fraction": 1.1}, "memory_fraction"),
        ({"memory_fraction": "much"}, "memory_fraction"),
        ({"batch_size_per_gpu": 0}, "batch_size_per_gpu"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
        ({"gpu_ids": [-1]}, "gpu_ids"),
        ({"gpu_ids": [1, 1]}, "each GPU once"),
        ({"backend": "mpi"}, "backend"),
        ({"gpus": 3}, "gpus"),
        ({"mixed_precision": 0}, "mixed_precision"),
        ({"batch_size_per_gpu": True}, "batch_size_per_gpu"),
    ],
)
def test_invalid_configs(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        GPUConfig(**values)
    assert GPUConfig(memory_fraction=1).memory_fraction == 1


@pytest.mark.seed("C1")
def test_what_a_config_means() -> None:
    config = GPUConfig(gpu_ids=[1, 3], sync_batch_norm=False, memory_fraction=0.8, backend="gloo")
    parallel = config.to_multi_gpu_config()
    assert (parallel.mode, parallel.device_ids) == (MultiGPUMode.DATAPARALLEL, [1, 3])
    assert (parallel.sync_bn, parallel.memory_fraction, parallel.backend) == (False, 0.8, "gloo")
    assert GPUConfig(distributed_training=True).to_multi_gpu_config().mode is MultiGPUMode.DISTRIBUTED
    assert GPUConfig(use_multi_gpu=False).to_multi_gpu_config().mode is MultiGPUMode.NONE
    assert GPUConfig().to_multi_gpu_config().device_ids is None
    settings = GPUConfig(batch_size_per_gpu=4, gradient_accumulation_steps=2).to_train_settings(2)
    assert settings == {"train.micro_batch_size": 4, "train.global_batch_size": 16, "model.precision": "auto"}
    ranks = GPUConfig(batch_size_per_gpu=4, distributed_training=True, mixed_precision=False).to_train_settings(2)
    assert ranks == {"train.micro_batch_size": 4, "train.global_batch_size": 8, "model.precision": "fp32"}
