"""Guard for training loops other than the engine's: custom code, or a trainer that calls a callback.

`OwnLoopGuard` judges the existing gradients, clips them, and drops those of a step to be skipped. It cannot rerun a
step. Every rank must hold the full model; one small all-gather makes all ranks reach the same verdict.

`Snapshots` are in-memory copies of weights and optimizer state to roll back to. Two are held on the weights' own
device, so no copy is waited for. With AdamW that is 24 bytes per trainable weight: little for an adapter, three more
models for a full fine-tune.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from pantheraml.base.errors import ConfigError, NonFiniteError, TrainingError
from pantheraml.engine.guard.guard import Guard
from pantheraml.engine.guard.norms import ShardedParams
from pantheraml.engine.guard.policy import StepNumbers, Verdict
from pantheraml.engine.optim import optimizer as optim
from pantheraml.parallel.process_group import World
from pantheraml.specs.train import StabilityConfig

SCHEDULED = ("params", "lr", "initial_lr")
"""Entries of optimizer param groups that a rollback leaves alone: the learning rate schedule continues."""


@dataclass(frozen=True)
class Snapshot:
    step: int
    weights: list[Tensor]
    states: list[dict[str, Any]]
    """Optimizer state of each weight; empty before the first step."""
    groups: list[dict[str, Any]]
    clipping: dict[str, Any]


class Snapshots:
    def __init__(self, guard: OwnLoopGuard, optimizer: Optimizer, every: int, *, step: int) -> None:
        """Take the first snapshot now, after `step`, and one every `every` steps."""
        self._guard, self._optimizer, self._every = guard, optimizer, every
        self._snapshots = [self._take(step)]

    def after(self, step: int) -> None:
        """Take a snapshot if one is due; call after every step."""
        if step - self._snapshots[-1].step >= self._every:
            self._snapshots = [self._snapshots[-1], self._take(step)]

    def roll_back(self, step: int) -> int | None:
        """Restore the newest snapshot at least `every` steps older than `step`; return its step, or None."""
        old_enough = [snapshot for snapshot in self._snapshots if snapshot.step <= step - self._every]
        if not old_enough:
            return None
        self._snapshots = old_enough
        self._restore(old_enough[-1])
        return old_enough[-1].step

    def _take(self, step: int) -> Snapshot:
        optimizer, parameters = self._optimizer, self._guard.parameters
        return Snapshot(
            step=step,
            weights=[parameter.detach().clone() for _, parameter in parameters],
            states=[copy.deepcopy(dict(optimizer.state.get(parameter, {}))) for _, parameter in parameters],
            groups=[
                {name: copy.deepcopy(value) for name, value in group.items() if name not in SCHEDULED}
                for group in optimizer.param_groups
            ],
            clipping=self._guard.clipping.to_state(),
        )

    @torch.no_grad()
    def _restore(self, snapshot: Snapshot) -> None:
        state = self._optimizer.state
        for (_, parameter), weights, saved in zip(
            self._guard.parameters, snapshot.weights, snapshot.states, strict=True
        ):
            parameter.copy_(weights)
            if saved:
                state[parameter] = _copied_into(state[parameter], saved)
            else:
                state.pop(parameter, None)
        for group, values in zip(self._optimizer.param_groups, snapshot.groups, strict=True):
            group.update(copy.deepcopy(values))
        self._guard.clipping.from_state(snapshot.clipping)


def _copied_into(current: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Copy `saved` into the existing tensors where possible: the optimizer may hold other references to them."""
    state: dict[str, Any] = {}
    for name, value in saved.items():
        target = current.get(name)
        if isinstance(value, Tensor) and isinstance(target, Tensor) and target.shape == value.shape:
            state[name] = target.copy_(value)
        else:
            state[name] = copy.deepcopy(value)
    return state


class OwnLoopGuard(Guard):
    """Guard of one model. Its state is saved and loaded like that of an engine run."""

    def __init__(self, config: StabilityConfig, max_grad_norm: float, model: nn.Module, world: World) -> None:
        """`world`: the ranks that hold a replica of `model` and decide together."""
        self.parameters, self._world = trained_parameters(model), world
        if not self.parameters:
            raise ConfigError("The model has no trainable parameters.", fix="Set requires_grad on some parameters.")
        if any(isinstance(parameter, DTensor) for _, parameter in self.parameters):
            raise ConfigError(
                "Outside of `pantheraml train`, the guard needs the full model on every rank.",
                fix="Train without FSDP and tensor parallelism, or use `pantheraml train`, whose guard supports them.",
            )
        self._params = ShardedParams(self.parameters, self.parameters, world.layout)
        super().__init__(config, max_grad_norm, self._params)

    def judge(self, loss: Tensor | None, *, had_nonfinite: Tensor | None = None) -> tuple[StepNumbers, Verdict]:
        """Decide on the current gradients. A collective.

        `loss`: this rank's loss; None if unknown. `had_nonfinite`: whether the gradients held non-finite values that
        have been zeroed since.
        """
        share = self._share()
        if had_nonfinite is not None:
            share = torch.where(had_nonfinite.to(share.device), torch.nan, share)
        own = torch.zeros_like(share) if loss is None else loss.detach().to(share).reshape(())
        losses, shares = zip(*self._world.gather(torch.stack([own, share]).tolist()).tolist(), strict=True)
        numbers = StepNumbers(
            loss_sums=list(losses),
            grad_norm=math.sqrt(sum(shares)),
            target_tokens=self._world.size,  # the loss is the mean over processes
            stop_requested=False,
        )
        return numbers, self.policy.decide(numbers, loss_scale=None)

    def clip(self, optimizer: Optimizer, norm: float) -> None:
        """Clip the gradients for the next step; with a non-finite norm they stay as they are."""
        if math.isfinite(norm):
            self.clipping.clip(optimizer, norm)
        else:
            optim.clip(optimizer, self.parameters, norm, 0.0)

    def zero_nonfinite(self) -> float:
        """Zero non-finite gradient values and return the norm of the rest. A collective."""
        for gradient in self._params.gradients():
            if gradient is not None:
                torch.nan_to_num_(gradient, nan=0.0, posinf=0.0, neginf=0.0)
        return float(self._world.gather([float(self._share())]).sum().sqrt())

    def drop_gradients(self) -> None:
        """Set gradients to None, which makes optimizers skip the parameters."""
        for _, parameter in self.parameters:
            parameter.grad = None

    def _share(self) -> Tensor:
        return self._params.share(self._params.gradients())


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def stop_error(step: int, verdict: Verdict, *, settings: str) -> TrainingError:
    """Build the error for a verdict to stop; `settings`: the class that takes on_nonfinite and on_spike."""
    kind = NonFiniteError if verdict.anomaly == "nonfinite" else TrainingError
    return kind(
        f"Training stopped at step {step}: {verdict.cause}.",
        fix=f"Lower the learning rate, or set on_nonfinite='skip' or on_spike='skip' in {settings}. The weights are"
        " those before that step.",
    )


@contextmanager
def scaled_rates(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Scale the learning rates for one step, then restore those of the scheduler."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups if factor != 1.0 else ():
        group["lr"] = group["lr"] * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
