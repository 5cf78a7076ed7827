"""AdamW whose two states take one byte a value each instead of four.

Values are stored in blocks of 256 with one float32 scale a block, as indices into a code table that is dense near zero,
so that small second moments keep their relative precision (after Dettmers et al., "8-bit Optimizers via Block-wise
Quantization", 2021). Tensors below 4,096 values stay in float32: they cost nothing and hold the most sensitive
parameters. The arithmetic itself is float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

BLOCK = 256
SMALLEST = 4096


def code_table(*, signed: bool) -> Tensor:
    """At most 256 ascending values in [-1, 1] or [0, 1]: decades, each with twice the points of the one below it."""
    bits = 6 if signed else 7
    positive: list[float] = []
    for decade in range(bits + 1):
        points = 2**decade
        edges = torch.linspace(0.1, 1.0, points + 1, dtype=torch.float64)
        middles = (edges[:-1] + edges[1:]) / 2
        positive += [float(m) * 10.0 ** (decade - bits) for m in middles]
    positive = sorted(positive)
    positive[-1] = 1.0
    values = [-v for v in positive] + [0.0] + positive if signed else [0.0, *positive]
    return torch.tensor(sorted(values), dtype=torch.float32)


def encode(values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (uint8, flat, padded to whole blocks) and scales (one a block)."""
    flat = values.flatten().float()
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scale = padded.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    midpoints = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(padded / scale.unsqueeze(1), midpoints).to(torch.uint8)
    return codes, scale


def decode(codes: Tensor, scale: Tensor, table: Tensor, shape: torch.Size) -> Tensor:
    flat = (table[codes.long()] * scale.unsqueeze(1)).flatten()
    return flat[: shape.numel()].view(shape)


class AdamW8bit(Optimizer):
    """Decoupled weight decay Adam with block-wise 8-bit moments."""

    def __init__(
        self, params: Any, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._tables: dict[tuple[torch.device, bool], Tensor] = {}

    def _table(self, device: torch.device, *, signed: bool) -> Tensor:
        key = (device, signed)
        if key not in self._tables:
            self._tables[key] = code_table(signed=signed).to(device)
        return self._tables[key]

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            zeros = torch.zeros_like(parameter, dtype=torch.float32)
            self._store(state, parameter, zeros, zeros)
        state["step"] += 1
        count = float(state["step"])
        first, second = self._read(state, parameter)
        gradient = parameter.grad.float()
        beta1, beta2 = group["betas"]
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = second.sqrt().div_(math.sqrt(1 - beta2**count)).add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        update = (first / denominator).mul_(-group["lr"] / (1 - beta1**count))
        parameter.add_(update.to(parameter.dtype))
        self._store(state, parameter, first, second)

    def _store(self, state: dict[str, Any], parameter: Tensor, first: Tensor, second: Tensor) -> None:
        if parameter.numel() < SMALLEST:
            state["exp_avg"], state["exp_avg_sq"] = first.clone(), second.clone()
            return
        device = parameter.device
        state["exp_avg_codes"], state["exp_avg_scale"] = encode(first, self._table(device, signed=True))
        # The square root halves the number of decades that the code table has to span.
        state["exp_rms_codes"], state["exp_rms_scale"] = encode(second.sqrt(), self._table(device, signed=False))

    def _read(self, state: dict[str, Any], parameter: Tensor) -> tuple[Tensor, Tensor]:
        if parameter.numel() < SMALLEST:
            return state["exp_avg"], state["exp_avg_sq"]
        device, shape = parameter.device, parameter.shape
        first = decode(state["exp_avg_codes"], state["exp_avg_scale"], self._table(device, signed=True), shape)
        root = decode(state["exp_rms_codes"], state["exp_rms_scale"], self._table(device, signed=False), shape)
        return first, root.square_()
