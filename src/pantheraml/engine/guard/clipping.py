"""Gradient clipping, one class per value of `stability.clipping`.

    none           no clipping
    value          each value to at most clip_value
    norm           each tensor to norm max_grad_norm
    global_norm    the global norm to max_grad_norm
    adaptive       each tensor to a fraction of its weight norm (AGC, Brock et al. 2021, per tensor)
    percentile     the global norm to a percentile of recent norms (AutoClip, Seetharaman et al. 2020)
    zclip          the global norm, if it is an outlier among recent norms (ZClip, Kumar et al. 2025)
    adagc          each tensor to a multiple of its own moving mean norm (AdaGC, Wang et al. 2025)

Global kinds compute a limit on the host from the gathered global norm, and the optimizer applies it as a factor.
Per-tensor kinds compute factors on the device from norms of full tensors. Either way, all ranks clip alike, whatever
the parallel layout.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from pantheraml.base.errors import CheckpointError
from pantheraml.engine.guard.norms import ShardedParams
from pantheraml.engine.guard.policy import MovingStatistics
from pantheraml.engine.optim import optimizer as optim
from pantheraml.parallel.json_gather import all_gather_json
from pantheraml.specs.train import StabilityConfig

State = dict[str, Any]

SMALLEST_WEIGHTS = 1e-3
"""Lower bound of the weight norm in adaptive clipping: half of an adapter's weights are initialized to zero."""


class Clipping(Protocol):
    """A kind of clipping and its statistics."""

    def clip(self, optimizer: Optimizer, norm: float) -> None:
        """Clip the gradients for the next optimizer step; `norm`: the global norm, which is finite."""
        ...

    def to_state(self) -> State:
        """State, equal on all ranks. A collective if pipeline stages hold different statistics."""
        ...

    def from_state(self, state: Mapping[str, Any]) -> None: ...


def build_clipping(config: StabilityConfig, max_grad_norm: float, params: ShardedParams) -> Clipping:
    match config.clipping:
        case "none":
            return GlobalNormClip(0.0, params)
        case "global_norm":
            return GlobalNormClip(max_grad_norm, params)
        case "percentile":
            return PercentileClip(config, max_grad_norm, params)
        case "zclip":
            return ZClip(config, max_grad_norm, params)
        case "value":
            return ValueClip(config.clip_value, params)
        case "norm":
            return TensorNormClip(max_grad_norm, params)
        case "adaptive":
            return AdaptiveClip(config.clip_weight_ratio, params)
        case "adagc":
            return AdaGC(config, max_grad_norm, params)


class Stateless:
    """Empty checkpoint state."""

    def to_state(self) -> State:
        return {}

    def from_state(self, state: Mapping[str, Any]) -> None:
        pass


# By global norm -------------------------------------------------------------------------------------------------------


class GlobalNormClip(Stateless):
    def __init__(self, limit: float, params: ShardedParams) -> None:
        self._limit, self._params = limit, params

    def clip(self, optimizer: Optimizer, norm: float) -> None:
        optim.clip(optimizer, self._params.parts, norm, self._limit)


class PercentileClip:
    def __init__(self, config: StabilityConfig, warmup_limit: float, params: ShardedParams) -> None:
        self._percentile, self._warmup = config.clip_percentile, min(config.clip_warmup_steps, config.clip_history)
        self._norms: deque[float] = deque(maxlen=config.clip_history)
        self._warmup_limit, self._params = warmup_limit, params

    def clip(self, optimizer: Optimizer, norm: float) -> None:
        warm = len(self._norms) >= self._warmup
        limit = float(np.percentile(self._norms, self._percentile)) if warm else self._warmup_limit
        optim.clip(optimizer, self._params.parts, norm, limit)
        # The unclipped norm: with clipped ones the limit could only fall.
        self._norms.append(norm)

    def to_state(self) -> State:
        return {"norms": list(self._norms)}

    def from_state(self, state: Mapping[str, Any]) -> None:
        self._norms.clear()
        self._norms.extend(state["norms"])


class ZClip:
    def __init__(self, config: StabilityConfig, warmup_limit: float, params: ShardedParams) -> None:
        self._threshold, self._warmup_limit, self._params = config.clip_zscore, warmup_limit, params
        self._norms = MovingStatistics(decay=config.clip_decay, warmup=config.clip_warmup_steps)

    def clip(self, optimizer: Optimizer, norm: float) -> None:
        limit = self._limit(norm)
        optim.clip(optimizer, self._params.parts, norm, limit)
        self._norms.add(min(norm, limit) if limit > 0 else norm)

    def _limit(self, norm: float) -> float:
        """Limit for `norm`, 0 for none. The further out a norm is, the closer to the mean it is clipped."""
        if not self._norms.ready:
            return self._warmup_limit
        score = self._norms.score(norm)
        if score <= self._threshold:
            return 0.0
        return self._norms.mean + self._threshold**2 / score * self._norms.std

    def to_state(self) -> State:
        return self._norms.to_state()

    def from_state(self, state: Mapping[str, Any]) -> None:
        self._norms.from_state(state)


# By value or tensor ---------------------------------------------------------------------------------------------------


class ValueClip(Stateless):
    def __init__(self, largest: float, params: ShardedParams) -> None:
        self._largest, self._params = largest, params

    def clip(self, optimizer: Optimizer, norm: float) -> None:
        optim.clip(optimizer, self._params.parts, norm, 0.0)
        gradients = [gradient for gradient in self._params.gradients() if gradient is not None]
        torch._foreach_clamp_max_(gradients, self._largest)
        torch._foreach_clamp_min_(gradients, -self._largest)


class TensorNormClip(Stateless):
    def __init__(self, limit: float, params: ShardedParams) -> None:
        self._limit, self._params = limit, params

    def clip(self, optimizer: Optimizer, norm: float) -> None:
        optim.clip(optimizer, self._params.parts, norm, 0.0)
        if self._limit > 0:
            norms = self._params.norms(self._params.gradients())
            _scale(self._params, _factors(norms, torch.full_like(norms, self._limit)))


class AdaptiveClip(Stateless):
    def __init__(self, ratio: float, params: ShardedParams) -> None:
        self._ratio, self._params = ratio, params

    def clip(self, optimizer: Optimizer, norm: float) -> None:
        optim.clip(optimizer, self._params.parts, norm, 0.0)
        norms = self._params.norms(self._params.gradients())
        weights = self._params.norms(self._params.weights()).clamp(min=SMALLEST_WEIGHTS)
        _scale(self._params, _factors(norms, self._ratio * weights))


class AdaGC:
    """During warmup this takes the mean of the norms, not the minimum as in the paper: half of an adapter has zero
    gradient in the first step, which would clip it to zero from then on."""

    def __init__(self, config: StabilityConfig, warmup_limit: float, params: ShardedParams) -> None:
        self._growth, self._decay, self._warmup = config.clip_growth, config.clip_decay, config.clip_warmup_steps
        self._warmup_limit, self._params = warmup_limit, params
        self._steps = 0
        self._means = torch.zeros_like(params.norms([None] * len(params.parts)))

    def clip(self, optimizer: Optimizer, norm: float) -> None:
        norms = self._params.norms(self._params.gradients())
        warm = self._steps >= self._warmup
        self._steps += 1
        if warm:
            optim.clip(optimizer, self._params.parts, norm, 0.0)
            # A tensor without any gradient so far has no limit.
            limits = torch.where(self._means > 0, self._growth * self._means, torch.inf)
            factors = _factors(norms, limits)
            _scale(self._params, factors)
            keep = self._decay
        else:
            optim.clip(optimizer, self._params.parts, norm, self._warmup_limit)
            factors = torch.full_like(norms, optim.clip_factor(norm, self._warmup_limit))
            keep = 1 - 1 / self._steps
        self._means = keep * self._means + (1 - keep) * factors * norms

    def to_state(self) -> State:
        means = dict(zip(self._params.names, self._means.tolist(), strict=True))
        if self._params.layout.dims.pipeline > 1:
            means = {name: mean for own in all_gather_json(means) for name, mean in own.items()}
        return {"steps": self._steps, "means": means}

    def from_state(self, state: Mapping[str, Any]) -> None:
        missing = [name for name in self._params.names if name not in state["means"]]
        if missing:
            raise CheckpointError(
                f"The checkpoint has no mean gradient norm for `{missing[0]}`, which this run trains.",
                fix="Resume with the configuration that wrote the checkpoint.",
            )
        self._steps = state["steps"]
        self._means = self._means.new_tensor([state["means"][name] for name in self._params.names])


def _factors(norms: Tensor, limits: Tensor) -> Tensor:
    """Factors that bring each norm down to its limit; 1 for norms within it, including norms of 0."""
    return torch.where(norms > limits, limits / norms, 1.0)


def _scale(params: ShardedParams, factors: Tensor) -> None:
    """Multiply each gradient by its factor, without a host synchronization."""
    pairs = [
        (gradient, factor.to(gradient.device))
        for gradient, factor in zip(params.gradients(), factors.float().unbind(), strict=True)
        if gradient is not None and gradient.numel() > 0
    ]
    if pairs:
        gradients, own = zip(*pairs, strict=True)
        torch._foreach_mul_(list(gradients), list(own))
