"""Weights and optimizer of a few steps ago, in memory: what a loop that is not the engine's rolls back to.

Two are kept, beside the weights on their device, so that nobody waits for a copy. With AdamW that is 24 bytes for each
trained weight: little for an adapter, three models more for a full fine-tune.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pantheraml.engine.guard.own_loop import OwnLoopGuard

SCHEDULED = ("params", "lr", "initial_lr")
"""What an optimizer's groups hold that no step changes: schedules count on."""


@dataclass(frozen=True)
class Snapshot:
    step: int
    weights: list[Tensor]
    states: list[dict[str, Any]]
    """The optimizer's of each of them; empty before its first step."""
    groups: list[dict[str, Any]]
    clipping: dict[str, Any]


class Snapshots:
    def __init__(self, guard: OwnLoopGuard, optimizer: Optimizer, every: int, *, step: int) -> None:
        """The weights now are those after `step`; one is kept each `every` steps."""
        self._guard, self._optimizer, self._every = guard, optimizer, every
        self._kept = [self._take(step)]

    def after(self, step: int) -> None:
        """To be told after every step, so that none is missed."""
        if step - self._kept[-1].step >= self._every:
            self._kept = [self._kept[-1], self._take(step)]

    def roll_back(self, step: int) -> int | None:
        """From the weights after `step` to the newest that are `every` or more steps older; None: there are none. The
        step that they are of."""
        old_enough = [snapshot for snapshot in self._kept if snapshot.step <= step - self._every]
        if not old_enough:
            return None
        self._kept = old_enough
        self._put_back(old_enough[-1])
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
    def _put_back(self, snapshot: Snapshot) -> None:
        state = self._optimizer.state
        for (_, parameter), weights, kept in zip(
            self._guard.parameters, snapshot.weights, snapshot.states, strict=True
        ):
            parameter.copy_(weights)
            if kept:
                state[parameter] = _filled(state[parameter], kept)
            else:
                state.pop(parameter, None)
        for group, values in zip(self._optimizer.param_groups, snapshot.groups, strict=True):
            group.update(copy.deepcopy(values))
        self._guard.clipping.from_state(snapshot.clipping)


def _filled(now: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """`kept`, in the tensors that are there: an optimizer may hold on to them elsewhere."""
    filled: dict[str, Any] = {}
    for name, value in kept.items():
        place = now.get(name)
        if isinstance(value, Tensor) and isinstance(place, Tensor) and place.shape == value.shape:
            filled[name] = place.copy_(value)
        else:
            filled[name] = copy.deepcopy(value)
    return filled
