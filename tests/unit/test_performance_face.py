"""pantheraml.performance in one process on a CPU: what each level changes, what is refused, and that results stay."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

from pantheraml.base.errors import ConfigError, UnsupportedModelError
from pantheraml.engine import tuning
from pantheraml.performance import (
    MultiGPUConfig,
    MultiGPUManager,
    OptimizationLevel,
    PerformanceConfig,
    PerformanceOptimizer,
    create_performance_optimizer,
)
from pantheraml.specs.multi_gpu import MultiGPUMode
from pantheraml.specs.performance import ONLY_IN_TRAIN

Make = Callable[..., PerformanceOptimizer]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh()) for _ in range(3))
            self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[PerformanceOptimizer] = []

    def create(**fields: Any) -> PerformanceOptimizer:
        made.append(create_performance_optimizer(PerformanceConfig(**fields)))
        return made[-1]

    yield create
    for optimizer in made:
        optimizer.cleanup()


def rows(**settings: Any) -> DataLoader[Any]:
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(24, 8), torch.randn(24, 1)), batch_size=4, **settings)


def trained(optimizer: PerformanceOptimizer | None) -> tuple[Layers, torch.optim.Optimizer]:
    model = Layers()
    wrapped = model if optimizer is None else optimizer.wrap_model_for_multi_gpu(model)
    adam, loader = torch.optim.AdamW(wrapped.parameters(), lr=0.01), rows()
    batches: Any = loader
    if optimizer is not None:
        batches = optimizer.optimize_training_pipeline(wrapped, loader, adam, nn.MSELoss())
        assert len(batches) == len(loader)
    torch.manual_seed(2)
    for inputs, targets in batches:
        adam.zero_grad()
        nn.functional.mse_loss(wrapped(inputs), targets).backward()
        adam.step()
    return model, adam


def values(optimizer: PerformanceOptimizer) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = optimizer.get_optimization_status()["optimizations"]
    assert all(each["reason"] for each in found.values())
    return {name: each["value"] for name, each in found.items()}


@pytest.mark.parametrize(
    ("level", "fused"), [("none", False), ("basic", True), ("advanced", True)]
)  # on a CPU, advanced has nothing to add: bf16 and TF32 are for GPUs
def test_levels(make: Make, level: str, fused: bool) -> None:
    optimizer = make(optimization_level=level)
    model, adam = trained(optimizer)
    assert {bool(group.get("fused")) for group in adam.param_groups} == {fused}
    found = values(optimizer)
    assert (found["fused_optimizer"], found["enable_mixed_precision"], found["tf32"]) == (fused, False, False)
    assert found["enable_compile"] is False
    expected, _ = trained(None)
    for own, plain in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.extended
def test_ultra_compiles(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)  # no helpers that outlive the test
    optimizer = make(optimization_level=OptimizationLevel.ULTRA)
    model = Layers().eval()
    expected = model(inputs := torch.randn(4, 8))
    wrapped = optimizer.wrap_model_for_multi_gpu(model)
    assert values(optimizer)["enable_compile"] is True
    torch.testing.assert_close(wrapped(inputs), expected, rtol=1e-4, atol=1e-5)
    assert wrapped._compiled_call_impl is not None


def test_levels_yield_to_what_is_set_by_name(make: Make) -> None:
    optimizer = make(optimization_level="ultra", enable_compile=False, enable_mixed_precision=False)
    optimizer.wrap_model_for_multi_gpu(Layers())
    reasons = optimizer.get_optimization_status()["optimizations"]
    assert [reasons[name]["reason"] for name in ("enable_compile", "enable_mixed_precision")] == ["as configured"] * 2


def test_data_workers_persist(make: Make) -> None:
    for level, persistent in (("none", False), ("basic", True)):
        optimizer = make(optimization_level=level)
        model = optimizer.wrap_model_for_multi_gpu(Layers())
        adam = torch.optim.SGD(model.parameters(), lr=0.1)
        pipeline = optimizer.optimize_training_pipeline(model, rows(num_workers=1), adam)
        assert pipeline.persistent_workers is persistent
        assert (pipeline.batch_size, pipeline.summary["global_batch_size"]) == (4, 4)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(10.0)[:, None].unbind())


LOADERS: dict[str, Callable[..., DataLoader[Any]]] = {
    "batches": lambda **more: DataLoader(TensorDataset(torch.arange(10.0)), batch_size=4, **more),
    "drop_last": lambda **more: DataLoader(TensorDataset(torch.arange(10.0)), batch_size=4, drop_last=True, **more),
    "single samples": lambda **more: DataLoader(TensorDataset(torch.arange(10.0)), batch_size=None, **more),
    "own sampler": lambda **more: DataLoader(TensorDataset(torch.arange(10.0)), sampler=[7, 1, 3], **more),
    "own batches": lambda **more: DataLoader(TensorDataset(torch.arange(10.0)), batch_sampler=[[7, 1], [3]], **more),
    "torch's batches": lambda **more: DataLoader(
        TensorDataset(torch.arange(10.0)), batch_sampler=BatchSampler([7, 1, 3], 2, drop_last=False), **more
    ),
    "stream": lambda **more: DataLoader(Stream(), batch_size=4, drop_last=True, **more),
    "stream of samples": lambda **more: DataLoader(Stream(), batch_size=None, **more),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_loaders_keep_their_batches(make: Make, kind: str) -> None:
    """A DataLoader with workers is made anew, with workers that persist."""
    loader, optimizer = LOADERS[kind](num_workers=1), make()
    found = optimizer.multi_gpu_manager.optimize_dataloader(loader)
    assert (found.persistent_workers, found.batch_size, found.drop_last) == (True, loader.batch_size, loader.drop_last)
    torch.testing.assert_close(list(found), list(LOADERS[kind]()))


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (lambda p: torch.optim.RMSprop(p), "no fused RMSprop"),
        (lambda p: torch.optim.AdamW(p, foreach=True), "created with foreach or fused"),
        (lambda p: torch.optim.AdamW(p, capturable=True), "capturable"),
    ],
)
def test_why_an_optimizer_is_not_fused(make: Make, optimizer: Callable[..., Any], reason: str) -> None:
    ours = make()
    model = ours.wrap_model_for_multi_gpu(Layers())
    ours.optimize_training_pipeline(model, rows(), optimizer(model.parameters()))
    found = ours.get_optimization_status()["optimizations"]["fused_optimizer"]
    assert found["value"] is False
    assert reason in found["reason"]


def test_an_optimizer_that_has_taken_steps_is_not_fused() -> None:
    model, adam = trained(None)
    assert "taken steps" in str(tuning.fuse_optimizer(adam, PerformanceConfig()).reason)
    del model


def test_autocast_computes_in_bf16_and_returns_float32() -> None:
    model = Layers().eval()
    expected = model(inputs := torch.randn(4, 8))
    dtypes: list[torch.dtype] = []
    model.layers[0][0].register_forward_hook(lambda _module, _inputs, output: dtypes.append(output.dtype))
    tuning.apply_autocast(model)
    tuning.apply_autocast(model)
    found = model(inputs)
    assert (dtypes, found.dtype) == ([torch.bfloat16], torch.float32)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.02)
    assert type(model).__name__ == "Layers"
    assert copy.deepcopy(model)(inputs).dtype == torch.float32


def test_checkpointing_recomputes_with_equal_gradients(make: Make) -> None:
    """Set after the model was wrapped; with dropout, whose masks are drawn again."""
    found = []
    for on in (False, True, False):
        optimizer = make(optimization_level="none")
        model = optimizer.wrap_model_for_multi_gpu(Layers())
        optimizer.config.enable_gradient_checkpointing = on
        calls: list[int] = []
        model.layers[1][0].register_forward_hook(lambda *_, calls=calls: calls.append(1))
        torch.manual_seed(3)
        model(torch.ones(4, 8, requires_grad=True)).sum().backward()
        found.append((len(calls), [parameter.grad for parameter in model.parameters()]))
    assert [calls for calls, _ in found] == [1, 2, 1]
    for plain, recomputed in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(plain, recomputed)


def test_checkpointing_needs_layers(make: Make) -> None:
    with pytest.raises(UnsupportedModelError, match="Linear has none"):
        make(enable_gradient_checkpointing=True).wrap_model_for_multi_gpu(nn.Linear(2, 2))
    with pytest.raises(UnsupportedModelError, match="transformers' decoder layers"):
        make(enable_gradient_checkpointing="unsloth").wrap_model_for_multi_gpu(Layers())


def test_pipeline_of_other_objects_is_refused(make: Make) -> None:
    optimizer = make()
    model = optimizer.wrap_model_for_multi_gpu(Layers())
    mine, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, Layers()))
    with pytest.raises(ConfigError, match="not wrapped by this optimizer"):
        optimizer.optimize_training_pipeline(Layers(), rows(), mine)
    with pytest.raises(ConfigError, match="no parameter of the model"):
        optimizer.optimize_training_pipeline(model, rows(), other)


VALUES: dict[str, dict[str, Any]] = {
    "aggregation": {"aggregation": "median"},
    "aggregation_weights": {"aggregation": "weighted", "aggregation_weights": [1.0, 2.0]},
    "batch_shares": {"batch_shares": [1, 2]},
    "restart_on": {"restart_on": []},
    "memory_fraction": {"memory_fraction": 0.5},
    "leave_out_nonfinite": {"leave_out_nonfinite": True},
    "strict": {"strict": True},
    "stages_per_process": {"pipeline": 2, "stages_per_process": 2},
}


@pytest.mark.parametrize("field", ONLY_IN_TRAIN)
def test_fields_that_only_a_run_reads_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=r"has no effect on your own loop: it is for `pantheraml train`"):
        PerformanceConfig(multi_gpu_config=MultiGPUConfig(**VALUES.get(field, {field: 7})))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"split_points": ["layers.1"]}, "split_points is for mode=hybrid"),
        ({"micro_batches": 2}, "micro_batches is for mode=hybrid"),
        ({"optimization_level": "extreme"}, "optimization_level"),
        ({"use_multi_gpu": True, "enable_multi_gpu": False}, "contradict"),
        ({"enable_compiling": True}, "no field `enable_compiling`"),
        ({"multi_gpu_config": MultiGPUConfig(auto_device_map=True)}, "auto_device_map has no effect"),
    ],
)
def test_bad_settings(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        PerformanceConfig(**fields)
    assert str(caught.value).count("fix:") == 1
    assert ".." not in str(caught.value)


def test_a_bad_value_that_is_set_later() -> None:
    config = PerformanceConfig()
    with pytest.raises(ConfigError, match="multi_gpu_bucket_cap_mb") as caught:
        config.multi_gpu_bucket_cap_mb = 0  # type: ignore[misc]
    assert str(caught.value).count("fix:") == 1
    config.multi_gpu_config.bucket_cap_mb = 0
    with pytest.raises(ConfigError, match="greater than or equal to 1") as caught:
        _ = config.multi_gpu
    assert str(caught.value).count("fix:") == 1


def test_a_config_of_another_kind() -> None:
    wrong = {"modee": "none"}
    for config in ("ddp", wrong):
        with pytest.raises(ConfigError, match="multi_gpu_config"):
            create_performance_optimizer(config)  # type: ignore[arg-type]
    assert wrong == {"modee": "none"}


def test_what_is_no_model_and_no_loader(make: Make) -> None:
    optimizer = make()
    with pytest.raises(ConfigError, match=r"model is a str, not a torch\.nn\.Module"):
        optimizer.wrap_model_for_multi_gpu("my-model")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="dataloader is a list, not a torch DataLoader"):
        optimizer.multi_gpu_manager.optimize_dataloader([1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize("device_ids", [[], [0, 0]])
def test_gpus_that_are_named_twice_or_not_at_all(make: Make, device_ids: list[int]) -> None:
    config = MultiGPUConfig(mode=MultiGPUMode.DATAPARALLEL, device_ids=device_ids)
    with pytest.raises(ConfigError, match="must name at least one GPU, each once"):
        make(multi_gpu_config=config).wrap_model_for_multi_gpu(Layers())


def test_batch_size_before_and_after_a_forward(make: Make) -> None:
    optimizer = make()
    model = optimizer.wrap_model_for_multi_gpu(Layers())
    assert optimizer.get_optimal_batch_size(32) == 32
    model(torch.randn(2, 8)).sum().backward()
    assert 1 <= optimizer.get_optimal_batch_size(16) <= 16
    with pytest.raises(ConfigError, match="0 is not a valid batch size"):
        optimizer.get_optimal_batch_size(0)


def test_memory(make: Make) -> None:
    memory = make().memory_manager
    usage = memory.get_memory_usage()
    assert 0 < usage["system_percent"] <= 100
    assert 0 < usage["process_mb"] < usage["system_total_mb"]
    assert memory.optimize_memory(force=True)["freed"] is True


def test_a_manager_may_be_subclassed() -> None:
    class Mine(MultiGPUManager):
        def _setup_multi_gpu(self) -> None:
            super()._setup_multi_gpu()
            self.ready = True

        def wrap_model(self, model: nn.Module) -> nn.Module:
            self.wrapped = super().wrap_model(model)
            return self.wrapped

    with Mine(MultiGPUConfig()) as manager:
        assert manager.ready
        assert manager.wrap_model(Layers()) is manager.wrapped
        assert not manager.is_multi_gpu_enabled()
        assert manager.distributed_process_group is None
