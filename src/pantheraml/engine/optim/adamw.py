"""Memory-efficient AdamW: weights in float32 or bf16, moments in float32, bf16 or 8 bits.

Results equal torch.optim.AdamW up to the rounding of stored values. A step works in place and allocates nothing of a
parameter's size; clipping is a factor applied as gradients are read, not a separate pass. Stochastic rounding of bf16
weights and moments is keyed by the seed, the parameter index and its step count: all ranks draw the same noise, and a
resumed run continues exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from pantheraml.kernels.adamw import AdamWStep, Moments8bit, adamw8bit_, adamw_

MomentFormat = Literal["fp32", "bf16", "8bit"]

SMALLEST_8BIT = 4096
"""Smaller parameters have float32 moments: these cost little, and are those of the most sensitive parameters."""


class LeanAdamW(Optimizer):
    """Adam with decoupled weight decay over float32 or bf16 parameters."""

    def __init__(
        self, params: Any, *, lr: float, betas: tuple[float, float], eps: float, moments: MomentFormat, seed: int
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.gradient_factor = 1.0
        """Factor on the gradients in the next steps (clipping)."""
        self._moments, self._seed = moments, seed

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
        if self._moments == "8bit" and parameter.numel() >= SMALLEST_8BIT:
            first, first_scale, root, root_scale = Moments8bit.zeros(parameter)
            quantized = {"first_codes": first, "first_scale": first_scale, "root_codes": root, "root_scale": root_scale}
            return {"step": count, **quantized}
        dtype = torch.bfloat16 if self._moments == "bf16" else torch.float32
        moments = {name: torch.zeros_like(parameter, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": count, **moments}


def _moments8bit(state: dict[str, Any]) -> Moments8bit:
    return Moments8bit(state["first_codes"], state["first_scale"], state["root_codes"], state["root_scale"])


def _key(seed: int, number: int, count: int) -> int:
    """31-bit RNG key, unlikely to be shared by another parameter, step or seed."""
    digest = hashlib.blake2b(f"{seed}:{number}:{count}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
