"""Code blocks of the product document about numerical stability; see tests/seed_blocks.py.

Most have no imports of their own: `NAMES` are what `from pantheraml.performance import ...` gives. One process without
a GPU runs what it can; tests/distributed/test_seed_blocks.py runs what needs ranks, tests/gpu what needs a GPU.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Iterator
from typing import Any, get_origin, get_type_hints

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pantheraml import performance, stability
from pantheraml.base.errors import DeviceError
from pantheraml.specs.multi_gpu import MultiGPUConfig, MultiGPUMode
from tests.seed_blocks import adapted, run, run_code

NAMES = {name: getattr(performance, name) for name in performance.__all__}
TYPES = {"nn": nn, "DataLoader": DataLoader, "Dict": dict, "Any": Any}
WITHOUT_GPUS = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without GPUs")


class YourModel(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.fixture
def optimizer() -> Iterator[performance.PerformanceOptimizer]:
    """A `PerformanceOptimizer`, as the blocks before have created it, with a wrapped model."""
    found = performance.create_performance_optimizer()
    found.wrap_model_for_multi_gpu(YourModel())
    yield found
    found.cleanup()


def bare(kind: Any) -> Any:
    """`dict` of `dict[str, Any]`."""
    return get_origin(kind) or kind


def same_methods(block: str, ours: type) -> None:
    """Every method of the block's class is in ours, and is called and answers in the same way."""
    theirs = run(block, **TYPES, **NAMES)[ours.__name__]
    methods = [name for name, value in vars(theirs).items() if inspect.isfunction(value)]
    assert len(methods) >= 4
    for name in methods:
        expected, found = (inspect.signature(getattr(kind, name)).parameters for kind in (theirs, ours))
        assert list(expected) == list(found)[: len(expected)], name
        assert all(found[other].default is not inspect.Parameter.empty for other in found if other not in expected)
        returned = get_type_hints(getattr(theirs, name)).get("return", type(None))
        assert bare(get_type_hints(getattr(ours, name))["return"]) is bare(returned), name


@pytest.mark.seed(
    *(
        "C1",
        "S1:33",
        "S1-014",
        "S1-015",
        "S1-016",
        "S1-017",
        "S1-018",
        "S1-019",
        "S1-020",
        "S1-021",
        "S1-022",
        "S1-023",
    ),
    *("S1-024", "S1-025", "S1-026", "S1-027", "S1-028", "S1-029", "S1-030", "S1-031", "S1-032", "S1-033", "S1-034"),
)
def test_fields_of_multi_gpu_config() -> None:
    from typing import Optional

    names = run("S1:33", dataclass=dataclasses.dataclass, MultiGPUMode=MultiGPUMode, Optional=Optional, List=list)
    theirs = dataclasses.asdict(names["MultiGPUConfig"]())
    assert len(theirs) == 20
    assert dataclasses.is_dataclass(MultiGPUConfig)
    ours = MultiGPUConfig()
    assert {name: getattr(ours, name) for name in theirs} == theirs
    assert MultiGPUConfig(**theirs) == ours


@pytest.mark.seed("S1:61", "S1-035", "S1-036", "S1-037", "S1-038", "S1-039", "S1-040", "S1-041", "S1-042", "S1-043")
def test_methods_of_the_manager() -> None:
    same_methods("S1:61", performance.MultiGPUManager)


@pytest.mark.seed("S1:77", "S1-046", "S1-047", "S1-048", "S1-049", "S1-050")
def test_methods_of_the_optimizer(optimizer: performance.PerformanceOptimizer) -> None:
    same_methods("S1:77", performance.PerformanceOptimizer)
    assert isinstance(optimizer.multi_gpu_manager, performance.MultiGPUManager)


@pytest.mark.seed("S1:206", "S1-075", "S1-076", "S1-077", "S1-078")
def test_methods_of_the_stability_manager() -> None:
    same_methods("S1:206", stability.NumericalStabilityManager)


@WITHOUT_GPUS
@pytest.mark.seed(
    "S1:92", "S1-062", "S1-084", partly="needs GPUs 0 to 3; on a host without them it is an error that says so"
)
def test_basic_setup() -> None:
    with pytest.raises(DeviceError, match=r"GPU 0 was requested, but 0 GPU\(s\) are visible"):
        run("S1:92", **{**NAMES, "YourModel": YourModel})


@pytest.mark.seed("S1:169", "S1-051", "S1-055", "S1-056", "S1-057", "S1-058", "S1-059", "S1-060", "S1-066", "S1-004")
def test_auto_mode() -> None:
    """Also the second half of the basic setup, which uses the config."""
    names = run("S1:169", **NAMES)
    config = names["config"]
    config.enable_mixed_precision, config.enable_compile = True, False
    dataset, criterion = TensorDataset(torch.randn(40, 4), torch.randn(40, 1)), nn.MSELoss()
    model = YourModel()
    rest = adapted("S1:92").partition("# Create optimizer\n")[2]
    names |= {"DataLoader": DataLoader, "dataset": dataset, "criterion": criterion, "YourModel": lambda: model}
    names["torch_optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    found = run_code(rest, "S1:92", **names)
    before = [parameter.clone() for parameter in model.parameters()]
    for inputs, targets in found["optimized_dataloader"]:
        criterion(found["wrapped_model"](inputs), targets).backward()
        found["torch_optimizer"].step()
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert found["optimizer"].get_optimization_status()["optimizations"]["enable_compile"]["value"] is False
    found["optimizer"].cleanup()


@pytest.mark.seed("S1:152", "S1-064", "S1-065", "S1-003")
@pytest.mark.parametrize("strategy", ["pipeline", "model_parallel", "data_parallel"])
def test_hybrid_configuration(strategy: str) -> None:
    code = adapted("S1:152").replace('"pipeline",', f'"{strategy}",')
    config = run_code(code, "S1:152", **NAMES)["config"]
    assert (config.multi_gpu.mode, config.multi_gpu.hybrid_strategy) == (MultiGPUMode.HYBRID, strategy)


@pytest.mark.seed("S1:187", "S1-067", "S1-068", "S1-069", "S1-070", "S1-071", "S1-072", "S1-073")
def test_fields_of_the_stability_config() -> None:
    from typing import Optional

    names = run("S1:187", dataclass=dataclasses.dataclass, Optional=Optional, List=list)
    theirs = dataclasses.asdict(names["PerformanceOptimizationConfig"]())
    ours = stability.PerformanceOptimizationConfig()
    assert {name: getattr(ours, name) for name in theirs} == theirs
    assert stability.PerformanceOptimizationConfig(**theirs) == ours


@pytest.mark.seed("S1:218", "S1-079", "S1-080", "S1-081", "S1-082", "S1-136")
def test_training_wrapper() -> None:
    torch.manual_seed(0)
    model = YourModel()
    before = [parameter.clone() for parameter in model.parameters()]
    found = run(
        "S1:218",
        create_training_wrapper=stability.create_training_wrapper,
        clipping_config=stability.GradientClippingConfig(),
        nan_config=stability.NaNHandlingConfig(),
        debug_config=stability.PyTorchDebuggingConfig(),
        performance_config=stability.PerformanceOptimizationConfig(multi_gpu_mode="auto"),
        dataloader=DataLoader(torch.randn(6, 4), batch_size=2),  # type: ignore[arg-type]
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )
    assert (found["stability_result"].step, found["stability_result"].action) == (3, "step")
    assert found["multi_gpu_status"]["training_stats"]["steps"] == 3
    assert found["optimal_batch_size"] == 32
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    found["wrapper"].cleanup()


@pytest.mark.seed("S1:264", "S1-096", "S1-097", "S1-098", "S1-100", "S1-129")
@WITHOUT_GPUS
def test_gpu_statistics(optimizer: performance.PerformanceOptimizer, capsys: pytest.CaptureFixture[str]) -> None:
    """Memory of each GPU is printed where there is one: tests/gpu/test_gpu_seed_blocks.py."""
    run("S1:264", optimizer=optimizer)
    assert capsys.readouterr().out.startswith("Device Count: 0\nCurrent Mode: none\nTraining Stats: {")


@pytest.mark.seed("S1:281", "S1-052", "S1-104", "S1-105", "S1-106")
def test_performance_metrics(optimizer: performance.PerformanceOptimizer, capsys: pytest.CaptureFixture[str]) -> None:
    run("S1:281", optimizer=optimizer)
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "Multi-GPU Mode: none"
    assert out[1] == f"Device Count: {torch.cuda.device_count()}"
    assert out[2].startswith("Multi-GPU Status: {'device_count'")


@pytest.mark.seed("S1:292", "S1-107", "S1-108")
def test_real_time_monitoring(optimizer: performance.PerformanceOptimizer, capsys: pytest.CaptureFixture[str]) -> None:
    run("S1:292", optimizer=optimizer, num_steps=101)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Step")]
    assert printed == ["Step 0: GPU Memory Usage:", "Step 100: GPU Memory Usage:"]


@pytest.mark.seed("S1:319", "S1-013", "S1-049", "S1-113")
def test_batch_size(optimizer: performance.PerformanceOptimizer) -> None:
    assert run("S1:319", optimizer=optimizer)["optimal_batch_size"] == 32


@pytest.mark.seed("S1:332", "S1-053", "S1-054", "S1-117", "S1-118", "S3-040", "S3-065")
@pytest.mark.parametrize("percent", [None, 81.0])
def test_memory_management(
    optimizer: performance.PerformanceOptimizer, monkeypatch: pytest.MonkeyPatch, percent: float | None
) -> None:
    measured = optimizer.memory_manager.get_memory_usage()
    assert 0 < measured["system_percent"] < 100
    freed = []
    optimize = optimizer.memory_manager.optimize_memory
    monkeypatch.setattr(optimizer.memory_manager, "optimize_memory", lambda force: freed.append(optimize(force=force)))
    if percent is not None:  # a host whose memory is full
        monkeypatch.setattr(
            optimizer.memory_manager, "get_memory_usage", lambda: {**measured, "system_percent": percent}
        )
    run("S1:332", optimizer=optimizer)
    assert len(freed) == ((percent or measured["system_percent"]) > 80)


@pytest.mark.seed("S1:345", "S1-119")
def test_error_handling(optimizer: performance.PerformanceOptimizer, capsys: pytest.CaptureFixture[str]) -> None:
    model = YourModel()
    assert run("S1:345", optimizer=optimizer, model=model)["wrapped_model"] is model
    assert capsys.readouterr().out == ""
    optimizer.config.multi_gpu_config = MultiGPUConfig(mode=MultiGPUMode.DATAPARALLEL, device_ids=[98, 99])
    assert run("S1:345", optimizer=optimizer, model=model)["wrapped_model"] is model
    assert capsys.readouterr().out.startswith("Multi-GPU setup failed: GPU 98 was requested")


@pytest.mark.seed("S1:359", "S1-061", "S1-120", "S1-121", "S1-122")
def test_out_of_memory(optimizer: performance.PerformanceOptimizer) -> None:
    model = YourModel()
    wrapped = optimizer.wrap_model_for_multi_gpu(model)
    found = run("S1:359", optimizer=optimizer, config=optimizer.config, torch=torch)
    assert found["optimal_batch_size"] == 16
    loss: Tensor = wrapped(torch.randn(2, 4)).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    done = optimizer.get_optimization_status()["optimizations"]["enable_gradient_checkpointing"]
    assert done["value"] is True


@pytest.mark.seed("S1:371", "S1-123")
def test_distributed_issues(optimizer: performance.PerformanceOptimizer, capsys: pytest.CaptureFixture[str]) -> None:
    run("S1:371", optimizer=optimizer, dist=dist)
    assert capsys.readouterr().out == "Distributed training not initialized\n"


@pytest.mark.seed("S1:384", "S1-099", "S1-125", "S1-126", "S1-127")
def test_performance_issues(optimizer: performance.PerformanceOptimizer, capsys: pytest.CaptureFixture[str]) -> None:
    run("S1:384", optimizer=optimizer, config=optimizer.config)
    assert capsys.readouterr().out.startswith("GPU utilization: [")
    ours = optimizer.config.multi_gpu
    assert (ours.bucket_cap_mb, ours.static_graph) == (50, True)


@pytest.mark.seed("S1:398", "S1-128")
def test_debug_mode(
    optimizer: performance.PerformanceOptimizer,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logger = logging.getLogger("multi_gpu_manager")
    monkeypatch.setattr(logger, "level", logger.level)
    run("S1:398", optimizer=optimizer)
    assert capsys.readouterr().out.startswith("Detailed status: {'device_count'")
    optimizer.wrap_model_for_multi_gpu(YourModel())
    assert [record for record in caplog.records if record.levelno == logging.DEBUG and record.name == logger.name]
    logger.setLevel(logging.NOTSET)


@pytest.mark.seed("S1:423", "S1-045", "S1-137")
def test_custom_extensions() -> None:
    kind = run("S1:423", **NAMES)["CustomMultiGPUManager"]
    manager = kind(performance.PerformanceConfig())
    model = YourModel()
    assert manager.custom_optimization(model) is None
    assert manager.wrap_model(model) is model
    manager.cleanup()


@pytest.mark.seed("S1-035", "S1-041", "S3-036")
@pytest.mark.seed("C2")
@pytest.mark.parametrize("config", [MultiGPUConfig(), performance.PerformanceConfig()], ids=["gpus", "performance"])
def test_a_manager_of_either_config(config: Any) -> None:
    with performance.MultiGPUManager(config) as manager:
        assert manager.config.multi_gpu_config == MultiGPUConfig()
        model = YourModel()
        assert manager.wrap_model(model) is model
        assert not manager.is_multi_gpu_enabled()
        assert manager.get_gpu_stats()["mode_reason"] != "the manager was closed"
    assert manager.get_gpu_stats()["mode_reason"] == "the manager was closed"
    manager.cleanup()
