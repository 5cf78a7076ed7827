"""`MultiGPUTrainer`: train any `nn.Module` on several GPUs, without a training loop of your own.

    trainer = MultiGPUTrainer(model=model, num_gpus=4, optimizer_config={"class": torch.optim.AdamW, "kwargs": {...}})
    trainer.setup()
    stats = trainer.train_epoch(dataloader)

Each rank takes its part of every batch, so the weights equal those of one process with the same global batch.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from pantheraml.base.errors import ConfigError
from pantheraml.engine.module_loop import LossFunction, ModuleLoop, check_loop_arguments
from pantheraml.engine.multi_gpu_wrapper import MultiGPUWrapper
from pantheraml.engine.optimizer_config import OptimizerConfig
from pantheraml.hooks import multi_gpu
from pantheraml.multigpu import start_ranks
from pantheraml.parallel.aggregate import attach
from pantheraml.specs.aggregation import AggregationMethod
from pantheraml.specs.multi_gpu import MultiGPUConfig
from pantheraml.specs.own_loop_configs import (
    GradientClippingConfig,
    NaNHandlingConfig,
    PyTorchDebuggingConfig,
    stability_of,
)
from pantheraml.specs.performance import OptimizationLevel, PerformanceConfig

__all__ = ["AggregationMethod", "MultiGPUTrainer"]


class MultiGPUTrainer:
    """Trains `model` by DDP, one rank per GPU; as a context manager it cleans up at the end."""

    def __init__(
        self,
        model: nn.Module,
        num_gpus: int | None = None,
        *,
        optimizer_config: Mapping[str, Any],
        aggregation_method: AggregationMethod | str = AggregationMethod.MEAN,
        aggregation_weights: Sequence[float] | None = None,
        loss_fn: LossFunction | None = None,
        max_grad_norm: float | None = None,
        nan_config: NaNHandlingConfig | None = None,
    ) -> None:
        """Nothing is started or changed before `setup`.

        `num_gpus` None: all. `optimizer_config`: {"class": an optimizer class, "kwargs": its arguments}.
        `aggregation_weights`: one per rank, for the method weighted. `loss_fn(outputs, targets)`, a mean over samples,
        is for batches of (inputs, targets); without it, the model is called with the batch and returns its loss.
        `max_grad_norm` None: gradients are not clipped. `nan_config`: what to do about NaN and spikes; by default, NaN
        stops the training with an error, before the weights change.
        """
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"model is a {type(model).__name__}, not a torch.nn.Module.", fix="Pass the model itself."
            )
        if num_gpus is not None and (type(num_gpus) is not int or num_gpus < 1):
            raise ConfigError(
                f"num_gpus={num_gpus!r} is not a positive integer.", fix="Pass 1 or more, or None for all GPUs."
            )
        check_loop_arguments(loss_fn, max_grad_norm)
        self._model, self._num_gpus = model, num_gpus
        self._optimizer_config = OptimizerConfig(optimizer_config)
        self._aggregation = multi_gpu.make_settings(None, aggregation_method, aggregation_weights)
        self._loss_fn, self._max_grad_norm = loss_fn, max_grad_norm
        self._stability = stability_of(
            GradientClippingConfig(), nan_config or NaNHandlingConfig(), PyTorchDebuggingConfig()
        )
        self._wrapper: MultiGPUWrapper | None = None
        self._loop: ModuleLoop | None = None
        self._loader: tuple[DataLoader[Any], DataLoader[Any]] | None = None
        self._epochs = 0
        self.optimizer: Optimizer | None = None
        """The optimizer, from `setup` on; for a learning rate schedule."""

    @property
    def model(self) -> nn.Module:
        """The model as it was passed, whose weights are trained; save this one."""
        return self._model

    def setup(self) -> None:
        """Start or join the ranks, wrap the model, create the optimizer. A collective; may be called again.

        A script started as a single process is relaunched from its beginning as one rank per GPU.
        """
        if self._loop is not None:
            return
        start_ranks(self._num_gpus, self._aggregation)
        atexit.register(self.cleanup)
        try:
            self._prepare()
        except BaseException:
            self.cleanup()
            raise

    def _prepare(self) -> None:
        config = MultiGPUConfig(world_size=self._num_gpus)
        wrapper = MultiGPUWrapper(PerformanceConfig(optimization_level=OptimizationLevel.NONE, multi_gpu_config=config))
        self._wrapper = wrapper
        wrapped = wrapper.wrap(self._model)
        optimizer = self._optimizer_config.make(self._model)
        finish = attach(wrapped, self._aggregation.gradient_aggregation, weights=self._aggregation.aggregation_weights)
        self._loop = ModuleLoop(
            wrapper,
            wrapped,
            optimizer,
            finish,
            loss_fn=self._loss_fn,
            stability=self._stability,
            max_grad_norm=self._max_grad_norm,
        )
        self.optimizer = optimizer

    def train_epoch(self, dataloader: DataLoader[Any]) -> dict[str, Any]:
        """Train on every sample of `dataloader` once; return loss, steps, samples, seconds of all ranks. A collective.

        Its batch size is that of each rank. A new order is drawn for every epoch if it shuffles.
        """
        if self._loop is None or self._wrapper is None:
            raise ConfigError("The trainer is not set up.", fix="Call setup() before train_epoch().")
        if self._loader is None or self._loader[0] is not dataloader:
            self._loader = (dataloader, self._wrapper.shard(dataloader))
        stats = self._loop.run(self._loader[1])
        self._epochs += 1
        return {"epoch": self._epochs, **stats, "world_size": self._wrapper.status()["world_size"]}

    def cleanup(self) -> None:
        """Leave the process group, unless you initialized it. May be called again."""
        atexit.unregister(self.cleanup)
        self._loop = self._loader = self.optimizer = None
        if self._wrapper is not None:
            self._wrapper.close()
            self._wrapper = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cleanup()
