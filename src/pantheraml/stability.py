"""Numerical stability for people's own training loops: the guard of `pantheraml train` around a step of theirs.

    wrapper = create_training_wrapper(GradientClippingConfig(clipping="zclip"), NaNHandlingConfig(on_nonfinite="skip"))
    for batch in batches:
        result = wrapper(model, model(**batch).loss, optimizer)

A call is one step: the backward pass, one verdict that all processes share, clipping, the optimizer's step. It leaves
no gradients behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from pantheraml.base import log
from pantheraml.base.errors import ConfigError, TrainingError
from pantheraml.engine.guard.groups import Norms
from pantheraml.engine.guard.operation import operation_with_nan
from pantheraml.engine.guard.own_loop import OwnLoopGuard, stopped, trained_parameters
from pantheraml.engine.guard.verdict import Action, Anomaly, Verdict, suspect
from pantheraml.engine.several_gpus import SeveralGPUs, is_compiled
from pantheraml.parallel.data import uses_reentrant_checkpointing
from pantheraml.specs.own_loop import (
    GradientClippingConfig,
    NaNHandlingConfig,
    PerformanceOptimizationConfig,
    PyTorchDebuggingConfig,
    stability_of,
)

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
    """What became of a step; the same on every process but for `operation`."""

    step: int
    action: Action
    """step, zero (taken, with 0 for gradient values that are not finite) or skip."""
    cause: str
    anomaly: Anomaly | None
    """What is wrong with the step; None if nothing is."""
    loss: float
    """The mean over processes."""
    grad_norm: float
    """Of all gradients as one, before clipping."""
    rate_factor: float
    """What the optimizer's learning rate is multiplied by for this step and those to come."""
    tensor: str | None = None
    """The gradient that an anomaly shows in, by name."""
    operation: str | None = None
    """With `debug`: the operation whose backward pass gave NaN in this process."""
    groups: Norms | None = None
    """Norms of gradients and weights, layer by layer; each `group_norms_every`-th step."""
    update_ratio: float | None = None
    """Norm of the update over that of the weights; each `update_ratio_every`-th step that is taken."""


class NumericalStabilityManager:
    """Watches over one model. Each configuration may be left out, and is read when the manager is made."""

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
        self._gpus = SeveralGPUs((performance_config or PerformanceOptimizationConfig()).to_multi_gpu_config())
        self._guard: OwnLoopGuard | None = None
        self._model: nn.Module | None = None
        self._learnt: Mapping[str, Any] | None = None
        self._steps = self._skipped = 0

    def __call__(self, model: nn.Module, loss: Tensor, optimizer: Optimizer) -> StabilityResult:
        """Take one step by `loss`, or leave it; a verdict to stop is an error. A collective.

        Gradients that are there already are added to. Loss and gradients must not be scaled (fp16's GradScaler).
        """
        guard = self._guard = self._guard or self._prepare(model)
        self._check(guard, model, loss)
        _backward(loss, keep_graph=self._settings.debug)
        numbers, verdict = guard.judge(loss)
        step = self._steps + 1
        tensor = operation = None
        if verdict.anomaly is not None:
            found = suspect(guard.parameters, verdict.anomaly)
            tensor = found and found.name
            logger.warning("step %s: %s (%s)", step, verdict.action, verdict.cause)
        if self._settings.debug and verdict.anomaly == "nonfinite":
            operation = _operation(model, guard, loss)
        groups = guard.groups.of_copies() if guard.groups.due(step) else None
        if verdict.action in ("step", "zero"):
            norm = guard.zero_nonfinite() if verdict.action == "zero" else numbers.grad_norm
            guard.clip(optimizer, norm)
            with guard.updates.measuring(), _rate(optimizer, verdict.rate_factor):
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
        """What was learnt of losses and norms so far, for a checkpoint: plain values, the same on every process."""
        learnt = self._learnt if self._guard is None else self._guard.to_state()
        return {"steps": self._steps, "skipped": self._skipped, "learnt": learnt}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps, self._skipped, self._learnt = state["steps"], state["skipped"], state["learnt"]
        self._guard = None

    def wrap_model_for_multi_gpu(self, model: nn.Module) -> nn.Module:
        """`model` under DDP where processes have met, under DataParallel where that was asked for, else as it is."""
        return self._gpus.wrap(model)

    def get_multi_gpu_status(self) -> dict[str, Any]:
        """Mode, devices and memory now; cheap enough for every step. What is not known is None."""
        status = self._gpus.status()
        utilisation = status.pop("gpu_utilization")
        steps = {"steps": self._steps, "skipped_steps": self._skipped}
        return {**status, "training_stats": {"gpu_utilization": utilisation, **steps}}

    def get_optimal_batch_size(self, base_batch_size: int) -> int:
        """The global batch that gives each copy of the wrapped model `base_batch_size` samples."""
        if base_batch_size < 1:
            raise ConfigError(f"{base_batch_size} is not a batch size.", todo="Give one sample or more.")
        return base_batch_size * self._gpus.copies

    def synchronize_gpus(self) -> None:
        """Wait until the GPUs of this process have done what they were given, and all processes are here."""
        self._gpus.synchronise()

    def _prepare(self, model: nn.Module) -> OwnLoopGuard:
        world = self._gpus.peers(model)
        if self._settings.debug and is_compiled(model):
            raise ConfigError(
                "PyTorchDebuggingConfig(debug=True) needs every operation, and a compiled model has them no more.",
                todo="Debug the model uncompiled.",
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
                "The model, or which of its parameters train, is not what it was in the step before.",
                todo="Make a new wrapper for each model, and whenever parameters are frozen or set free.",
            )
        if loss.numel() != 1:
            raise ConfigError(f"The loss has {loss.numel()} values.", todo="Give one, such as loss.mean().")
        if not loss.requires_grad:
            raise ConfigError(
                "The loss does not depend on any parameter that is trained.",
                todo="Give the loss as the model computes it: not detached, and not under torch.no_grad().",
            )


def create_training_wrapper(
    clipping_config: GradientClippingConfig | None = None,
    nan_config: NaNHandlingConfig | None = None,
    debug_config: PyTorchDebuggingConfig | None = None,
    performance_config: PerformanceOptimizationConfig | None = None,
) -> NumericalStabilityManager:
    """A manager, to be called with `(model, loss, optimizer)` in every step."""
    return NumericalStabilityManager(clipping_config, nan_config, debug_config, performance_config)


def _unwrapped(model: nn.Module) -> nn.Module:
    """So that names are those of one process."""
    return model.module if isinstance(model, DistributedDataParallel | DataParallel) else model


def _backward(loss: Tensor, *, keep_graph: bool) -> None:
    try:
        loss.backward(retain_graph=keep_graph)  # type: ignore[no-untyped-call]
    except RuntimeError as err:
        if "backward through the graph a second time" not in str(err):
            raise
        raise ConfigError(
            "The backward pass of this loss has been run already.",
            todo="Leave loss.backward() and optimizer.step() to the wrapper, and give it every loss once.",
        ) from err


def _operation(model: nn.Module, guard: OwnLoopGuard, loss: Tensor) -> str | None:
    """Of this process's own backward pass, run once more: nothing is sent, and gradients stay what they are."""
    parameters = [parameter for _, parameter in guard.parameters]
    try:
        # DDP may have been set up for reentrant checkpointing, and must not take this for a pass of the step
        if not uses_reentrant_checkpointing(model):
            return operation_with_nan(lambda: torch.autograd.grad(loss, parameters, allow_unused=True))
    except RuntimeError as err:
        if "use_reentrant=True" not in str(err):
            raise
    logger.warning("which operation gave NaN cannot be told under reentrant checkpointing")
    return None


@contextmanager
def _rate(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """For a step: what a schedule has set stays its own."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups if factor != 1.0 else ():
        group["lr"] = group["lr"] * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def _stopped(step: int, verdict: Verdict, tensor: str | None, operation: str | None) -> TrainingError:
    error = stopped(step, verdict, settings="NaNHandlingConfig")
    if tensor is not None:
        error.where = f"the gradient of {tensor}"
    if operation is not None:
        error.add_note(operation)
    return error
