"""pantheraml.stability: on which devices and in which mode your own loop runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pantheraml.base.errors import ConfigError, DeviceError, LaunchError, PantheraError
from pantheraml.engine.multi_gpu_mode import check_device, choose_mode, relaunch_count
from pantheraml.specs.multi_gpu import MultiGPUConfig, MultiGPUMode
from pantheraml.stability import NumericalStabilityManager, PerformanceOptimizationConfig, create_training_wrapper
from tests.unit.test_stability_face import Loop


@pytest.mark.seed("S1-067", "S1-069", "S1-070")
def test_multi_gpu_settings_are_applied() -> None:
    config = PerformanceOptimizationConfig(multi_gpu_device_ids=[0, 1], multi_gpu_static_graph=False)
    config.multi_gpu_bucket_cap_mb = 50
    config.multi_gpu_find_unused_parameters = True
    config.multi_gpu_backend = "gloo"
    made = config.to_multi_gpu_config()
    assert (made.mode, made.backend, made.device_ids) == (MultiGPUMode.AUTO, "gloo", [0, 1])
    assert (made.bucket_cap_mb, made.find_unused_parameters, made.static_graph) == (50, True, False)
    config.enable_multi_gpu = False
    assert config.to_multi_gpu_config().mode is MultiGPUMode.NONE


@pytest.mark.seed("S1-074")
def test_multi_gpu_settings_come_beside_the_others() -> None:
    """A field that has nothing to do with several GPUs means the same, whatever those say."""
    others = [name for name in PerformanceOptimizationConfig.model_fields if "multi_gpu" not in name]
    assert others == ["enable_gradient_checkpointing"]
    for settings in ({}, {"enable_multi_gpu": False}, {"multi_gpu_mode": "none", "multi_gpu_bucket_cap_mb": 50}):
        calls = []
        for on in (False, True):
            config = PerformanceOptimizationConfig(enable_gradient_checkpointing=on, **settings)
            model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
            wrapped = create_training_wrapper(performance_config=config).wrap_model_for_multi_gpu(model)
            seen: list[int] = []
            model[1][0].register_forward_hook(lambda *_, seen=seen: seen.append(1))
            wrapped(torch.ones(2, 4, requires_grad=True)).sum().backward()
            calls.append(len(seen))
        assert calls == [1, 2]


SINGLE_PROCESS: dict[str, Any] = {"world_size": 1, "launched": 1, "gpus": 1}


@pytest.mark.seed("S0-093", "S1-004", "S1-006", "S1-066", "S1-068", "S1-112")
@pytest.mark.parametrize(
    ("requested", "environment", "mode"),
    [
        ("auto", {}, "none"),
        ("auto", {"gpus": 4}, "dataparallel"),
        ("auto", {"gpus": 4, "why_no_replicas": "quantized"}, "none"),
        ("auto", {"world_size": 2, "launched": 2}, "distributed"),
        ("distributed", {"world_size": 2, "launched": 2}, "distributed"),
        ("dataparallel", {"gpus": 2}, "dataparallel"),
        ("none", {"world_size": 2, "launched": 2}, "none"),
        ("none", {"launched": 2}, "none"),
    ],
)
def test_the_mode(requested: str, environment: dict[str, Any], mode: str) -> None:
    chosen, reason = choose_mode(MultiGPUConfig(mode=MultiGPUMode(requested)), **{**SINGLE_PROCESS, **environment})
    assert chosen == mode
    assert reason


@pytest.mark.seed("S1-119")
@pytest.mark.parametrize(
    ("requested", "environment", "error"),
    [
        ("auto", {"launched": 2}, LaunchError),
        ("distributed", {}, LaunchError),
        ("dataparallel", {"world_size": 2, "launched": 2, "gpus": 2}, ConfigError),
        ("dataparallel", {}, DeviceError),
    ],
)
def test_requested_mode_that_is_unavailable_raises(
    requested: str, environment: dict[str, int], error: type[PantheraError]
) -> None:
    with pytest.raises(error):
        choose_mode(MultiGPUConfig(mode=MultiGPUMode(requested)), **{**SINGLE_PROCESS, **environment})


@pytest.mark.parametrize(
    ("fields", "gpus", "requested", "count"),
    [
        ({}, 4, None, 4),
        ({}, 4, 2, 2),
        ({}, 0, 2, 2),
        ({}, 0, None, None),
        ({}, 1, None, None),
        ({}, 4, 1, None),
        ({"world_size": 3}, 4, 2, 3),
        ({"world_size": 2}, 0, None, 2),
        ({"mode": "none"}, 4, 2, None),
        ({"rank": 0, "local_rank": 0, "world_size": 2}, 0, 2, None),
    ],
)
def test_ranks_of_a_relaunched_script(
    fields: dict[str, Any], gpus: int, requested: int | None, count: int | None
) -> None:
    """As with enable_multi_gpu, PANTHERAML_NPROC counts, also without GPUs."""
    assert relaunch_count(MultiGPUConfig(**fields), gpus, requested) == count


def test_model_devices_and_backends() -> None:
    gpu, host = torch.device("cuda", 1), torch.device("cpu")
    check_device(gpu, [0, 1], backend="nccl", requested="nccl")
    check_device(gpu, [1], backend="gloo", requested="gloo")
    check_device(host, [], backend="gloo", requested="nccl")
    with pytest.raises(DeviceError, match="cuda:1, which is not among the GPUs to use: 0, 2"):
        check_device(gpu, [0, 2], backend="nccl", requested="nccl")
    with pytest.raises(ConfigError, match="uses gloo, but nccl"):
        check_device(gpu, [0, 1], backend="gloo", requested="nccl")
    with pytest.raises(DeviceError, match="on the CPU"):
        check_device(host, [], backend="nccl", requested="nccl")


def test_ranks_without_a_process_group_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    loop = Loop()
    with pytest.raises(LaunchError, match="MASTER_ADDR and MASTER_PORT are not set"):
        create_training_wrapper()
    with pytest.raises(LaunchError, match="no process group"):
        choose_mode(MultiGPUConfig(), world_size=1, launched=2, gpus=0)
    off = PerformanceOptimizationConfig(enable_multi_gpu=False)
    loop.run(create_training_wrapper(performance_config=off), 1)


def test_one_process_keeps_its_model() -> None:
    manager = NumericalStabilityManager(performance_config=PerformanceOptimizationConfig())
    assert manager.get_multi_gpu_status()["mode_reason"] == "no model was wrapped yet"
    model = Loop().model
    assert manager.wrap_model_for_multi_gpu(model) is model
    manager.synchronize_gpus()
    status = manager.get_multi_gpu_status()
    assert status["current_mode"] == "none"
    assert status["mode_reason"] != "no model was wrapped yet"
    assert status["world_size"] == 1
    assert status["device_count"] == len(status["gpu_memory"]) == len(status["training_stats"]["gpu_utilization"])
    for gpu in status["gpu_memory"]:
        assert gpu.keys() == {"device", "allocated_mb", "free_mb", "total_mb"}
    assert manager.get_optimal_batch_size(32) == 32
    with pytest.raises(ConfigError, match="0 is not a valid batch size"):
        manager.get_optimal_batch_size(0)


def test_missing_gpu_is_an_error() -> None:
    config = PerformanceOptimizationConfig(multi_gpu_device_ids=[torch.cuda.device_count()])
    manager = NumericalStabilityManager(performance_config=config)
    with pytest.raises(DeviceError, match="was requested"):
        manager.wrap_model_for_multi_gpu(Loop().model)
    assert manager.get_multi_gpu_status()["device_count"] == 0
