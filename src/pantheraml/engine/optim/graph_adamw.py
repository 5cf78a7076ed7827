"""torch's fused AdamW with the step as a CUDA graph, once gradients have fixed addresses.

An adapter has hundreds of small tensors, and the host takes longer to pass them to the kernels than the kernels take to
run. The GPU is idle meanwhile, because the step waits for the verdict. A graph needs a single launch. Learning rate and
clipping factor change from step to step, so the graph reads them from device memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.adamw import adamw

from pantheraml.models.cuda_capture import CapturedGraph, capture


class _DeviceScalar:
    """Scalar on the device, written only when it changes: it rarely does, and every launch costs idle GPU time."""

    def __init__(self, value: float, device: torch.device) -> None:
        self._value, self.on_device = value, torch.full((), value, device=device)

    def set(self, value: float) -> None:
        if value != self._value:
            self._value = value
            self.on_device.fill_(value)


class GraphAdamW(AdamW):
    """Adam with decoupled weight decay over float32 parameters on one GPU."""

    def __init__(self, params: Any, *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, fused=True)
        self.gradient_factor = 1.0
        """Factor on the gradients in the next steps (clipping)."""
        self._graphs: dict[bool, CapturedGraph] = {}
        """Graphs without and with multiplication by the clipping factor."""
        self._rates: list[_DeviceScalar] = []
        self._factor: _DeviceScalar | None = None

    @property
    def is_captured(self) -> bool:
        return bool(self._graphs)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        assert closure is None, "gradients must already be computed"
        if self._graphs:
            self.replay()
            return
        if self.gradient_factor < 1:
            torch._foreach_mul_(self._gradients(), self.gradient_factor)
        super().step()

    def replay(self) -> None:
        """Replay the captured step, without torch's wrapper around `step`: there are no hooks to run, and its profiler
        annotation takes the host longer than everything else."""
        clips = self.gradient_factor < 1
        if clips:
            assert self._factor is not None
            self._factor.set(self.gradient_factor)
        for rate, group in zip(self._rates, self.param_groups, strict=True):
            rate.set(group["lr"])
        self._graphs[clips].replay()

    def preset_learning_rate(self, value: float) -> None:
        """Copy the likely learning rate of the next step to the device ahead of time."""
        for rate in self._rates:
            rate.set(value)

    def capture(self) -> None:
        """Capture the step: from now on parameters, gradients and states must keep their addresses.

        Call after a first step, which creates the states. Changes no values.
        """
        gradients = self._gradients()
        device = gradients[0].device
        self._factor = _DeviceScalar(1.0, device)
        self._rates = [_DeviceScalar(group["lr"], device) for group in self.param_groups]
        for clips in (False, True):
            self._graphs[clips] = self._capture(partial(self._launch, gradients, clips=clips))

    @torch.no_grad()
    def _launch(self, gradients: list[Tensor], *, clips: bool) -> None:
        """Launch the kernels of a step."""
        if clips:
            assert self._factor is not None
            torch._foreach_mul_(gradients, self._factor.on_device)
        for rate, group in zip(self._rates, self.param_groups, strict=True):
            self._update(group, rate.on_device)

    def _capture(self, launch: Callable[[], None]) -> CapturedGraph:
        return capture(launch, self._gradients()[0].device)[0]

    def drop_graphs(self) -> None:
        """Run eagerly from now on, because gradients will be reallocated."""
        self._graphs.clear()

    def _update(self, group: dict[str, Any], rate: Tensor) -> None:
        updated = [parameter for parameter in group["params"] if parameter.grad is not None]
        states = [self.state[parameter] for parameter in updated]
        adamw(
            updated,
            [parameter.grad for parameter in updated],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=rate,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _gradients(self) -> list[Tensor]:
        return [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
