"""Memory-efficient AdamW: weights in float32 or bf16, moments in float32, bf16 or 8 bits.

Results equal torch.optim.AdamW up to the rounding of stored values. A step works in place and allocates nothing of a
parameter's size; clipping is a factor applied as gradients are read, not a separate pass. Stochastic rounding of bf16
weights and moments is keyed by the seed, the parameter index and its step count: all ranks draw the same noise, and a
resumed run continues exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from pantheraml.base.errors import CheckpointError, ConfigError
from pantheraml.kernels.adamw import AdamWStep, Moments8bit, adamw8bit_, adamw_

MomentFormat = Literal["fp32", "bf16", "8bit"]

SMALLEST_8BIT = 4096
"""Smaller parameters have float32 moments: these cost little, and are those of the most sensitive parameters."""


class LeanAdamW(Optimizer):
    """Adam with decoupled weight decay over float32 or bf16 parameters.

    `not_8bit`: parameters whose moments are float32 where the others' are 8-bit.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        moments: MomentFormat,
        seed: int,
        not_8bit: Iterable[Tensor] = (),
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.gradient_factor = 1.0
        """Factor on the gradients in the next steps (clipping)."""
        self._moments, self._seed = moments, seed
        self._not_8bit = {id(parameter) for parameter in not_8bit}  # tensors compare by element

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of `state_dict` exactly: torch would cast every state to its parameter's dtype."""
        saved = state_dict["state"]
        super().load_state_dict({**state_dict, "state": {}})
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in saved:
                self.state[parameter] = self._restored(parameter, saved[number])

    def _restored(self, parameter: Tensor, saved: dict[str, Tensor]) -> dict[str, Tensor]:
        names = _STATES_8BIT if self._is_8bit(parameter) else _STATES
        if saved.keys() != set(names):
            raise CheckpointError(
                f"The saved optimizer state has {', '.join(saved)}, but this optimizer's is {', '.join(names)}.",
                fix="Resume with the optimizer that wrote the checkpoint.",
            )
        return {
            name: value.to("cpu" if name == "step" else parameter.device, copy=True) for name, value in saved.items()
        }

    def _is_8bit(self, parameter: Tensor) -> bool:
        return self._moments == "8bit" and parameter.numel() >= SMALLEST_8BIT and id(parameter) not in self._not_8bit

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        number = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                number += 1
                if parameter.grad is not None:
                    self._update(parameter, group, number)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any], number: int) -> None:
        assert parameter.grad is not None
        if isinstance(parameter, DTensor):
            raise ConfigError(
                "This AdamW does not support sharded parameters (FSDP2) in a Hugging Face trainer.",
                fix='Use optim="adamw_torch" or DDP, or train with `pantheraml train`, which shards it.',
            )
        assert parameter.is_contiguous(), "the kernels walk parameters in memory order"
        state = self.state[parameter]
        if not state:
            state.update(self._first_state(parameter))
        state["step"] += 1
        count = int(state["step"])
        beta1, beta2 = group["betas"]
        step = AdamWStep(
            learning_rate=group["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            count=count,
            gradient_factor=self.gradient_factor,
            key=_key(self._seed, number, count),
        )
        gradient = parameter.grad.contiguous()
        if "first_codes" in state:
            adamw8bit_(parameter, gradient, _moments8bit(state), step)
        else:
            adamw_(parameter, gradient, state["exp_avg"], state["exp_avg_sq"], step)

    def _first_state(self, parameter: Tensor) -> dict[str, Tensor]:
        # On the host, where reading the count needs no synchronization.
        count = torch.zeros((), dtype=torch.float32)
        if self._is_8bit(parameter):
            return dict(zip(_STATES_8BIT, (count, *Moments8bit.zeros(parameter)), strict=True))
        dtype = torch.bfloat16 if self._moments == "bf16" else torch.float32
        moments = [torch.zeros_like(parameter, dtype=dtype) for _ in _STATES[1:]]
        return dict(zip(_STATES, (count, *moments), strict=True))


_STATES = ("step", "exp_avg", "exp_avg_sq")
_STATES_8BIT = ("step", "first_codes", "first_scale", "root_codes", "root_scale")


def _moments8bit(state: dict[str, Any]) -> Moments8bit:
    return Moments8bit(*(state[name] for name in _STATES_8BIT[1:]))


def _key(seed: int, number: int, count: int) -> int:
    """31-bit RNG key, unlikely to be shared by another parameter, step or seed."""
    digest = hashlib.blake2b(f"{seed}:{number}:{count}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
