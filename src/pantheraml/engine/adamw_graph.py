"""torch's fused AdamW whose step is one CUDA graph, once gradients stay where they are.

An adapter has hundreds of small tensors, and the host takes longer to hand them all to the kernels than those take to
run; meanwhile the GPU has nothing to do, because the step waits for the verdict before it. A recording has the host
launch once. Learning rate and clipping change from step to step, so a graph reads them from the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.adamw import adamw

from pantheraml.engine.graph import Graph


class _Number:
    """On the device, where it is written when it changes. Mostly it does not, and the GPU waits for every launch."""

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
        """What the next steps multiply gradients by."""
        self._graphs: dict[bool, Graph] = {}
        """By whether gradients are multiplied by the factor first."""
        self._rates: list[_Number] = []
        self._factor: _Number | None = None

    @property
    def is_recorded(self) -> bool:
        return bool(self._graphs)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        assert closure is None, "gradients are there already"
        if self._graphs:
            self.replay()
            return
        if self.gradient_factor < 1:
            torch._foreach_mul_(self._gradients(), self.gradient_factor)
        super().step()

    def replay(self) -> None:
        """A recorded step, without what torch puts around `step`: hooks, of which there are none, and a name for its
        profiler, which takes the host longer than all the rest."""
        clips = self.gradient_factor < 1
        if clips:
            assert self._factor is not None
            self._factor.set(self.gradient_factor)
        for rate, group in zip(self._rates, self.param_groups, strict=True):
            rate.set(group["lr"])
        self._graphs[clips].replay()

    def expect_rate(self, value: float) -> None:
        """The next step will most likely be one with that learning rate: it can be on the device by then."""
        for rate in self._rates:
            rate.set(value)

    def record(self) -> None:
        """From now on a step is a replay: parameters, gradients and states must stay in the memory they are in.

        There has been a step, which made the states. Nothing is changed by this.
        """
        gradients = self._gradients()
        device = gradients[0].device
        self._factor = _Number(1.0, device)
        self._rates = [_Number(group["lr"], device) for group in self.param_groups]
        for clips in (False, True):
            self._graphs[clips] = self._capture(partial(self._launch, gradients, clips=clips))

    @torch.no_grad()
    def _launch(self, gradients: list[Tensor], *, clips: bool) -> None:
        """A step's kernels."""
        if clips:
            assert self._factor is not None
            torch._foreach_mul_(gradients, self._factor.on_device)
        for rate, group in zip(self._rates, self.param_groups, strict=True):
            self._update(group, rate.on_device)

    def _capture(self, launch: Callable[[], None]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            launch()
        return graph

    def forget_recording(self) -> None:
        """Gradients are about to lie elsewhere."""
        self._graphs.clear()

    def _update(self, group: dict[str, Any], rate: Tensor) -> None:
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        states = [self.state[parameter] for parameter in trained]
        adamw(
            trained,
            [parameter.grad for parameter in trained],
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
