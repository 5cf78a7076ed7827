"""Numerical stability for your own training loop: the guard of `pantheraml train` around your step.

    wrapper = create_training_wrapper(GradientClippingConfig(clipping="zclip"), NaNHandlingConfig(on_nonfinite="skip"))
    for batch in batches:
        result = wrapper(model, model(**batch).loss, optimizer)

A call is one step: backward, one verdict shared by all ranks, gradient clipping, the optimizer step. It leaves no
gradients behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from pantheraml.base import log
from pantheraml.base.errors import ConfigError, TrainingError
from pantheraml.engine.guard.nan_origin import trace_nan_backward
from pantheraml.engine.guard.norms import Norms
from pantheraml.engine.guard.own_loop import OwnLoopGuard, scaled_rates, stop_error, trained_parameters
from pantheraml.engine.guard.policy import Action, Anomaly, Verdict, find_suspect
from pantheraml.engine.multi_gpu_wrapper import MultiGPUWrapper, is_compiled
from pantheraml.parallel.data import uses_reentrant_checkpointing
from pantheraml.parallel.micro_batches import MicroBatches
from pantheraml.specs.own_loop_configs import (
    GradientClippingConfig,
    NaNHandlingConfig,
    PerformanceOptimizationConfig,
    PyTorchDebuggingConfig,
    stability_of,
)
from pantheraml.specs.performance import PerformanceConfig

__all__ = [
    "GradientClippingConfig",
    "NaNHandlingConfig",
    "NumericalStabilityManager",
    "PerformanceOptimizationConfig",
    "PyTorchDebuggingConfig",
    "StabilityResult",
    "create_training_wrapper",
]

logger = log.get(__name__)


@dataclass(frozen=True)
class StabilityResult:
    """Outcome of a step; the same on every rank except for `operation`."""

    step: int
    action: Action
    """step, zero (taken, with 0 for non-finite gradient values) or skip."""
    cause: str
    anomaly: Anomaly | None
    """Kind of anomaly; None if the step is fine."""
    loss: float
    """Mean over ranks."""
    grad_norm: float
    """Global gradient norm before clipping."""
    rate_factor: float
    """Factor on the optimizer's learning rate, for this step and later ones."""
    tensor: str | None = None
    """Name of the parameter whose gradient shows the anomaly."""
    operation: str | None = None
    """With `debug`: the operation whose backward returned NaN on this rank."""
    groups: Norms | None = None
    """Per-layer norms of gradients and weights; every `group_norms_every`-th step."""
    update_ratio: float | None = None
    """Norm of the update over that of the weights; every `update_ratio_every`-th step that is taken."""


class NumericalStabilityManager:
    """Guards one model. Each configuration is optional, and read when the manager is created, except
    `enable_gradient_checkpointing`, which takes effect in the next forward of a wrapped model."""

    def __init__(
        self,
        clipping_config: GradientClippingConfig | None = None,
        nan_config: NaNHandlingConfig | None = None,
        debug_config: PyTorchDebuggingConfig | None = None,
        performance_config: PerformanceOptimizationConfig | None = None,
    ) -> None:
        clipping = clipping_config or GradientClippingConfig()
        self._settings = stability_of(
            clipping, nan_config or NaNHandlingConfig(), debug_config or PyTorchDebuggingConfig()
        )
        self._max_grad_norm = clipping.max_grad_norm
        performance = performance_config or PerformanceOptimizationConfig()
        self._gpus = MultiGPUWrapper(PerformanceConfig.of(performance), performance)
        log.start_for_scripts()
        self._gpus.setup()
        self._guard: OwnLoopGuard | None = None
        self._model: nn.Module | None = None
        self._learnt: Mapping[str, Any] | None = None
        self._steps = self._skipped = 0

    def __call__(self, model: nn.Module, loss: Tensor, optimizer: Optimizer) -> StabilityResult:
        """Take one step on `loss`, or skip it; a verdict to stop raises. A collective.

        Existing gradients are accumulated into. Loss and gradients must not be scaled (fp16's GradScaler).
        """
        guard = self._guard = self._guard or self._prepare(model)
        self._check(guard, model, loss)
        _backward(loss, keep_graph=self._settings.debug)
        numbers, verdict = guard.judge(loss)
        step = self._steps + 1
        tensor = operation = None
        if verdict.anomaly is not None:
            suspect = find_suspect(guard.parameters, verdict.anomaly)
            tensor = suspect and suspect.name
            logger.warning("step %s: %s (%s)", step, verdict.action, verdict.cause)
        if self._settings.debug and verdict.anomaly == "nonfinite":
            operation = _operation(model, guard, loss)
        groups = guard.groups.replicated_norms() if guard.groups.due(step) else None
        if verdict.action in ("step", "zero"):
            norm = guard.zero_nonfinite() if verdict.action == "zero" else numbers.grad_norm
            guard.clip(optimizer, norm)
            with guard.updates.measuring(), scaled_rates(optimizer, verdict.rate_factor):
                optimizer.step()
        optimizer.zero_grad()
        guard.drop_gradients()
        if verdict.action == "stop":
            raise _stopped(step, verdict, tensor, operation)
        self._steps, self._skipped = step, self._skipped + (verdict.action == "skip")
        update, weights = guard.updates.take()
        return StabilityResult(
            step=step,
            action=verdict.action,
            cause=verdict.cause,
            anomaly=verdict.anomaly,
            loss=numbers.loss,
            grad_norm=numbers.grad_norm,
            rate_factor=verdict.rate_factor,
            tensor=tensor,
            operation=operation,
            groups=groups,
            update_ratio=(update / weights) ** 0.5 if weights else None,
        )

    def state_dict(self) -> dict[str, Any]:
        """Loss and norm statistics, for a checkpoint: plain values, the same on every rank."""
        learnt = self._learnt if self._guard is None else self._guard.to_state()
        return {"steps": self._steps, "skipped": self._skipped, "learnt": learnt}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps, self._skipped, self._learnt = state["steps"], state["skipped"], state["learnt"]
        self._guard = None

    def wrap_model_for_multi_gpu(self, model: nn.Module) -> nn.Module:
        """Wrap `model` for several GPUs: DDP for several ranks, else as its mode says, or leave it as it is."""
        return self._gpus.wrap(model)

    def get_multi_gpu_status(self) -> dict[str, Any]:
        """Return mode, devices and memory; cheap enough for every step. Unknown values are None."""
        status = self._gpus.status()
        status["training_stats"] |= {"steps": self._steps, "skipped_steps": self._skipped}
        return status

    def get_optimal_batch_size(self, base_batch_size: int) -> int:
        """Return the global batch size that gives each replica up to `base_batch_size` samples, as many as fit and run
        fast in the model's last training forward. A collective."""
        return self._gpus.optimal_batch_size(base_batch_size)

    def optimize_dataloader(self, dataloader: DataLoader[Any]) -> DataLoader[Any]:
        """Return `dataloader` with the samples of this rank, each read by one rank; as it is in a single process."""
        return self._gpus.shard(dataloader)

    def cleanup(self) -> None:
        """Leave the process group, unless you initialized it. May be called again."""
        self._gpus.close()

    def synchronize_gpus(self) -> None:
        """Wait for this process's GPUs to finish, and for all ranks."""
        self._gpus.synchronize()

    def _prepare(self, model: nn.Module) -> OwnLoopGuard:
        world = self._gpus.peers(model)
        if self._settings.debug and is_compiled(model):
            raise ConfigError(
                "PyTorchDebuggingConfig(debug=True) needs single operations, which a compiled model does not have.",
                fix="Debug the model uncompiled.",
            )
        guard = OwnLoopGuard(self._settings, self._max_grad_norm, _unwrapped(model), world)
        if self._learnt is not None:
            guard.from_state(self._learnt)
        self._model = model
        return guard

    def _check(self, guard: OwnLoopGuard, model: nn.Module, loss: Tensor) -> None:
        now, known = trained_parameters(_unwrapped(model)), guard.parameters
        same = len(now) == len(known) and all(one is other for (_, one), (_, other) in zip(now, known, strict=True))
        if model is not self._model or not same:
            raise ConfigError(
                "The model, or its set of trainable parameters, has changed since the last step.",
                fix="Create a new wrapper for each model, and whenever parameters are frozen or unfrozen.",
            )
        if loss.numel() != 1:
            raise ConfigError(f"The loss has {loss.numel()} values.", fix="Pass a scalar, such as loss.mean().")
        if not loss.requires_grad:
            raise ConfigError(
                "The loss does not depend on any trainable parameter.",
                fix="Pass the loss as the model computes it: not detached, and not under torch.no_grad().",
            )


def create_training_wrapper(
    clipping_config: GradientClippingConfig | None = None,
    nan_config: NaNHandlingConfig | None = None,
    debug_config: PyTorchDebuggingConfig | None = None,
    performance_config: PerformanceOptimizationConfig | None = None,
) -> NumericalStabilityManager:
    """Create a manager, to be called with `(model, loss, optimizer)` in every step."""
    return NumericalStabilityManager(clipping_config, nan_config, debug_config, performance_config)


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside the wrappers of multi-GPU modes, so that names have no prefix."""
    while isinstance(model, DistributedDataParallel | DataParallel | MicroBatches):
        model = model.module
    return model


def _backward(loss: Tensor, *, keep_graph: bool) -> None:
    try:
        loss.backward(retain_graph=keep_graph)  # type: ignore[no-untyped-call]
    except RuntimeError as err:
        if "backward through the graph a second time" not in str(err):
            raise
        raise ConfigError(
            "backward() was already called on this loss.",
            fix="Leave loss.backward() and optimizer.step() to the wrapper, and pass each loss once.",
        ) from err


def _operation(model: nn.Module, guard: OwnLoopGuard, loss: Tensor) -> str | None:
    """Rerun this rank's backward to find the operation; no communication, and gradients are unchanged."""
    parameters = [parameter for _, parameter in guard.parameters]
    try:
        # DDP may be set up for reentrant checkpointing, and must not count this as a backward of the step
        if not uses_reentrant_checkpointing(model):
            return trace_nan_backward(lambda: torch.autograd.grad(loss, parameters, allow_unused=True))
    except RuntimeError as err:
        if "use_reentrant=True" not in str(err):
            raise
    logger.warning("reentrant checkpointing: cannot tell which operation returned NaN")
    return None


def _stopped(step: int, verdict: Verdict, tensor: str | None, operation: str | None) -> TrainingError:
    error = stop_error(step, verdict, settings="NaNHandlingConfig")
    if tensor is not None:
        error.where = f"the gradient of {tensor}"
    if operation is not None:
        error.add_note(operation)
    return error
