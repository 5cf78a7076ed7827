"""Rank script of test_performance: custom loops through `pantheraml.performance`, which joins the ranks itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, SequentialSampler

from pantheraml.base.errors import PantheraError
from pantheraml.performance import (
    MultiGPUConfig,
    MultiGPUManager,
    OptimizationLevel,
    PerformanceConfig,
    PerformanceOptimizer,
    create_performance_optimizer,
)

BATCH, EPOCHS, SEED = 3, 2, 5
CASES: dict[str, dict[str, Any]] = {
    "shuffled": {"samples": 23, "shuffle": True},
    "fewer-than-ranks": {"samples": 19},
    "sum": {"samples": 23, "reduction": "sum"},
    "accumulated": {"samples": 23, "shuffle": True, "accumulate": 2},
    "sharded": {"samples": 23, "shuffle": True, "hybrid": True},
    "checkpointed": {"samples": 19, "checkpointing": True},
    "drop-last": {"samples": 23, "shuffle": True, "drop_last": True},
    "workers": {"samples": 7, "workers": 1},
}


class Samples(Dataset[tuple[Tensor, Tensor, int]]):
    def __init__(self, count: int) -> None:
        self._inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self._inputs[index], self._inputs[index].sum(0, keepdim=True).sin(), index

    def __len__(self) -> int:
        return len(self._inputs)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def make_loader(case: dict[str, Any], batch: int, workers: int = 0) -> DataLoader[Any]:
    return DataLoader(
        Samples(case["samples"]),
        batch_size=batch,
        shuffle=case.get("shuffle", False),
        drop_last=case.get("drop_last", False),
        num_workers=workers,
        generator=torch.Generator().manual_seed(SEED),
    )


def weights(model: nn.Module) -> list[float]:
    values = [p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]
    flat: list[float] = torch.cat([value.flatten() for value in values]).tolist()
    return flat


def train(model: nn.Module, batches: Iterable[Any], optimizer: Any, criterion: nn.Module, every: int) -> list[Any]:
    """A plain training loop; returns the samples of each batch."""
    seen = []
    for _ in range(EPOCHS):
        for number, (inputs, targets, indices) in enumerate(batches):
            accumulates = every > 1 and number % every != every - 1
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = not accumulates
            (criterion(model(inputs), targets) / every).backward()
            seen.append(indices.tolist())
            if not accumulates:
                optimizer.step()
                optimizer.zero_grad()
    return seen


def learning_rate(case: dict[str, Any]) -> float:
    return 0.01 if case.get("reduction") == "sum" else 0.1


def trained_alone(case: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The reference: one process, plain torch, with batches of all ranks together."""
    model, loader = make_model(), make_loader(case, BATCH * ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate(case), momentum=0.5)
    criterion = nn.MSELoss(reduction=case.get("reduction", "mean"))
    seen = train(model, loader, optimizer, criterion, case.get("accumulate", 1))
    return {"weights": weights(model), "seen": seen}


def trained(case: dict[str, Any]) -> dict[str, Any]:
    multi_gpu = MultiGPUConfig(mode="hybrid", hybrid_strategy="data_parallel") if case.get("hybrid") else None
    config = PerformanceConfig(
        multi_gpu_config=multi_gpu or MultiGPUConfig(),
        enable_gradient_checkpointing=case.get("checkpointing", False),
    )
    ours = PerformanceOptimizer(config)
    model = ours.wrap_model_for_multi_gpu(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate(case), momentum=0.5)
    criterion = nn.MSELoss(reduction=case.get("reduction", "mean"))
    batches = ours.optimize_training_pipeline(
        model, make_loader(case, BATCH, case.get("workers", 0)), optimizer, criterion
    )
    assert isinstance(batches.sampler, DistributedSampler)
    assert batches.batch_size == BATCH
    seen = train(model, batches, optimizer, criterion, case.get("accumulate", 1))
    assert len(seen) == EPOCHS * len(batches)
    assert not isinstance(model, DistributedDataParallel) or not case.get("hybrid")
    found = {"weights": weights(model), "seen": seen, "summary": batches.summary}
    ours.cleanup()
    assert dist.is_initialized(), "the group belongs to another manager"
    return found


def orders(manager: MultiGPUManager) -> dict[str, Any]:
    """Orders of epochs, and a user's own batch samplers: one of a class of their own, and torch's."""
    loader: Any = manager.optimize_dataloader(make_loader({"samples": 12, "shuffle": True}, 2))
    read = lambda: [i for *_, indices in loader for i in indices.tolist()]  # noqa: E731
    found: dict[str, Any] = {"own": [read(), read()]}
    found["set"] = []
    for epoch in (3, 4, 3):
        loader.set_epoch(epoch)
        found["set"].append(read())

    class Own(BatchSampler):
        pass

    for name, kind in (("bucketed", Own), ("batched", BatchSampler)):
        batches = kind(SequentialSampler(range(10)), 3, drop_last=False)
        bucketed = manager.optimize_dataloader(DataLoader(Samples(10), batch_sampler=batches))
        found[name] = [indices.tolist() for *_, indices in bucketed]
        assert len(bucketed) == len(found[name])
        assert manager.optimize_dataloader(bucketed) is bucketed
    return found


def between_batches(manager: MultiGPUManager) -> list[float]:
    """Weights of training batches, with an evaluation between batch and forward."""
    training = manager.optimize_dataloader(make_loader({"samples": 7}, 3))
    evaluation = manager.optimize_dataloader(make_loader({"samples": 1}, 3))
    found = []
    for _ in training:
        for _ in evaluation:
            pass
        found.append(manager._wrapper._weight.factor)
    return [*found, manager._wrapper._weight.factor]


def monitored() -> dict[str, Any]:
    config = PerformanceConfig(optimization_level=OptimizationLevel.NONE)
    ours = create_performance_optimizer(config)
    inner = make_model()
    model = ours.wrap_model_for_multi_gpu(inner)
    for step in range(12):
        if step == 6:
            config.enable_gradient_checkpointing = True
            config.multi_gpu_bucket_cap_mb = 50
        model(torch.randn(4, 4)).sum().backward()
    ours.synchronize_gpus()
    names = [type(layer).__mro__[1].__name__ for layer in inner if isinstance(layer, nn.Linear)]
    return {
        "status": ours.get_multi_gpu_status(),
        "checkpointed": names,
        "optimizations": ours.get_optimization_status()["optimizations"],
        "batch": ours.get_optimal_batch_size(8),
        "enabled": ours.multi_gpu_manager.is_multi_gpu_enabled(),
        "group": bool(ours.multi_gpu_manager.distributed_process_group),
    }


def refused() -> str:
    try:
        MultiGPUManager(MultiGPUConfig(world_size=7)).wrap_model(make_model())
    except PantheraError as err:
        return f"{type(err).__name__}: {err}"
    return "accepted"


def late_optimizer() -> str:
    """FSDP replaces the parameters: an optimizer that was created before would train nothing."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours = PerformanceOptimizer(
        PerformanceConfig(multi_gpu_config=MultiGPUConfig(mode="hybrid", hybrid_strategy="data_parallel"))
    )
    wrapped = ours.wrap_model_for_multi_gpu(model)
    try:
        ours.optimize_training_pipeline(wrapped, make_loader({"samples": 4}, 2), optimizer, None)
    except PantheraError as err:
        return err.what
    return "accepted"


def main() -> None:
    torch.set_num_threads(1)
    assert not dist.is_initialized()
    owner = MultiGPUManager(MultiGPUConfig(timeout_seconds=120))
    assert dist.is_initialized()
    rank = dist.get_rank()
    found = {
        "cases": {name: trained(case) for name, case in CASES.items()},
        "orders": orders(owner),
        "between": between_batches(owner),
        "monitored": monitored(),
        "refused": refused(),
        "late": late_optimizer(),
    }
    owner.cleanup()
    assert not dist.is_initialized()
    owner.cleanup()
    Path(sys.argv[1], f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
