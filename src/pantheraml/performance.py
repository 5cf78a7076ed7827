"""Multi-GPU training and optimizations for your own training loop and any `nn.Module`.

    optimizer = create_performance_optimizer(PerformanceConfig(optimization_level=OptimizationLevel.ADVANCED))
    model = optimizer.wrap_model_for_multi_gpu(model)
    batches = optimizer.optimize_training_pipeline(model, dataloader, torch_optimizer, criterion)
    for inputs, targets in batches:
        ...

Ranks that train like this get the same weights as one process with the same global batch. A plain script on a host with
several GPUs is relaunched as one rank per GPU when the optimizer is created, so create it first.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from pantheraml.base import log
from pantheraml.base.errors import ConfigError
from pantheraml.engine.memory.usage import MemoryManager
from pantheraml.engine.multi_gpu_wrapper import MultiGPUWrapper
from pantheraml.engine.to_device import move_batch
from pantheraml.engine.tuning import fuse_optimizer
from pantheraml.specs.multi_gpu import MultiGPUConfig, MultiGPUMode
from pantheraml.specs.performance import OptimizationLevel, PerformanceConfig
from pantheraml.specs.plan import Choice

__all__ = [
    "MemoryManager",
    "MultiGPUConfig",
    "MultiGPUManager",
    "MultiGPUMode",
    "OptimizationLevel",
    "PerformanceConfig",
    "PerformanceOptimizer",
    "TrainingPipeline",
    "create_performance_optimizer",
]


class MultiGPUManager:
    """Joins the ranks, wraps a model and shards its DataLoader. Made to be subclassed.

    In a process group, `wrap_model`, `optimize_dataloader`, `synchronize` and `get_optimal_batch_size` are collectives.
    As a context manager, it cleans up at the end.
    """

    def __init__(self, config: PerformanceConfig | MultiGPUConfig) -> None:
        self.config = config if isinstance(config, PerformanceConfig) else PerformanceConfig(multi_gpu_config=config)
        self._wrapper = MultiGPUWrapper(self.config)
        self._setup_multi_gpu()

    def _setup_multi_gpu(self) -> None:
        """Relaunch a lone script as one rank per GPU, or join the ranks that were started."""
        log.start_for_scripts()
        self._wrapper.setup()
        atexit.register(self.cleanup)

    @property
    def distributed_process_group(self) -> dist.ProcessGroup | None:
        """The process group of all ranks, or None."""
        return dist.group.WORLD if dist.is_initialized() else None

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Wrap `model` in DDP, DataParallel or as hybrid says, after applying the settings of the config to it."""
        return self._wrapper.wrap(model)

    def optimize_dataloader(self, dataloader: DataLoader[Any]) -> DataLoader[Any]:
        """Return `dataloader` with a `DistributedSampler` that reads each sample on one rank, or as it is.

        It keeps batch size (per rank), collate_fn, workers and the order of its sampler, which is drawn on rank 0.
        """
        return self._wrapper.shard(dataloader)

    def synchronize(self) -> None:
        """Wait for this process's GPUs, and for all ranks."""
        self._wrapper.synchronize()

    def get_gpu_stats(self) -> dict[str, Any]:
        """Return mode, devices, memory and statistics of the training; cheap enough for every step."""
        return self._wrapper.status()

    def is_multi_gpu_enabled(self) -> bool:
        """Whether the wrapped model trains on several devices or in several processes."""
        return self._wrapper.mode is not MultiGPUMode.NONE

    def get_optimal_batch_size(self, base_batch_size: int) -> int:
        """Return the global batch size that gives each replica up to `base_batch_size` samples: as many as fit into the
        memory that is free, or fewer if that is clearly faster, measured on the model's last training inputs."""
        return self._wrapper.optimal_batch_size(base_batch_size)

    def cleanup(self) -> None:
        """Leave the process group, unless you initialized it, and restore settings of the process. May be repeated."""
        atexit.unregister(self.cleanup)
        self._wrapper.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cleanup()


class TrainingPipeline:
    """The optimized DataLoader: iterates, has a length and all else of it; batches are on the device of the model."""

    def __init__(self, loader: DataLoader[Any], device: torch.device | None, summary: dict[str, Any]) -> None:
        self.dataloader, self.summary = loader, summary
        self._device = device if device is not None and device.type != "cpu" else None

    def __iter__(self) -> Iterator[Any]:
        for batch in self.dataloader:
            yield batch if self._device is None else move_batch(batch, self._device)

    def __len__(self) -> int:
        return len(self.dataloader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["dataloader"], name)


class PerformanceOptimizer:
    """Wraps and optimizes model, DataLoader and optimizer as its config says."""

    def __init__(self, config: PerformanceConfig) -> None:
        self.multi_gpu_manager = MultiGPUManager(config)
        self.config = self.multi_gpu_manager.config
        self.memory_manager = MemoryManager()
        self._choices: list[Choice] = []

    def wrap_model_for_multi_gpu(self, model: nn.Module) -> nn.Module:
        """See `MultiGPUManager.wrap_model`; a mode that is not available raises."""
        return self.multi_gpu_manager.wrap_model(model)

    def get_multi_gpu_status(self) -> dict[str, Any]:
        """See `MultiGPUManager.get_gpu_stats`."""
        return self.multi_gpu_manager.get_gpu_stats()

    def get_optimal_batch_size(self, base_batch_size: int) -> int:
        """See `MultiGPUManager.get_optimal_batch_size`."""
        return self.multi_gpu_manager.get_optimal_batch_size(base_batch_size)

    def synchronize_gpus(self) -> None:
        """See `MultiGPUManager.synchronize`."""
        self.multi_gpu_manager.synchronize()

    def optimize_training_pipeline(
        self, model: nn.Module, dataloader: DataLoader[Any], optimizer: Optimizer, criterion: Any = None
    ) -> TrainingPipeline:
        """Optimize what a loop trains with: `optimizer` in place, `dataloader` as the result, which iterates like it.

        `model` is the wrapped model. `criterion` says whether the loss is a mean or a sum over samples.
        """
        wrapper = self.multi_gpu_manager._wrapper
        inner = wrapper.inner
        if inner is None or (model is not inner and all(module is not inner for module in model.modules())):
            raise ConfigError(
                "The model was not wrapped by this optimizer.", fix="Pass what wrap_model_for_multi_gpu returned."
            )
        known = {id(parameter) for parameter in model.parameters()}
        if not any(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"]):
            raise ConfigError(
                "The optimizer has no parameter of the model, which wrapping may have replaced.",
                fix="Create the optimizer from the wrapped model's parameters.",
            )
        wrapper.sum_losses(getattr(criterion, "reduction", "mean") == "sum")
        self._choices = [fuse_optimizer(optimizer, self.config)]
        loader = self.multi_gpu_manager.optimize_dataloader(dataloader)
        per_rank = loader.batch_size
        replicas = dist.get_world_size() if loader is not dataloader and dist.is_initialized() else 1
        summary = {
            "batch_size": per_rank,
            "global_batch_size": None if per_rank is None else per_rank * replicas,
            "ranks": replicas,
            "optimizations": self._optimizations(),
        }
        return TrainingPipeline(loader, wrapper.device, summary)

    def get_optimization_status(self) -> dict[str, Any]:
        """Return the config as it is applied, what each optimization did and why, and the multi-GPU status."""
        status = self.get_multi_gpu_status()
        return {
            "config": {
                "optimization_level": str(self.config.optimization_level),
                "multi_gpu_mode": status["current_mode"],
                "device_count": status["device_count"],
            },
            "optimizations": self._optimizations(),
            "memory": self.memory_manager.get_memory_usage(),
            "multi_gpu_status": status,
        }

    def cleanup(self) -> None:
        """See `MultiGPUManager.cleanup`."""
        self.multi_gpu_manager.cleanup()

    def _optimizations(self) -> dict[str, dict[str, Any]]:
        choices = [*self.multi_gpu_manager._wrapper.choices, *self._choices]
        return {choice.name: {"value": choice.value, "reason": choice.reason} for choice in choices}


def create_performance_optimizer(config: PerformanceConfig | None = None) -> PerformanceOptimizer:
    return PerformanceOptimizer(config or PerformanceConfig())
