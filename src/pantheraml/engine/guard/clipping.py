"""Clipping of gradients, in every kind that a run can ask for.

    none           as they are
    value          each value to at most clip_value
    norm           each tensor to at most max_grad_norm
    global_norm    all as one to at most max_grad_norm
    adaptive       each tensor to a share of the norm of its weights (AGC, Brock et al. 2021, tensor by tensor)
    percentile     all as one to a percentile of their recent norms (AutoClip, Seetharaman et al. 2020)
    zclip          all as one, where their norm is an outlier among recent ones (ZClip, Kumar et al. 2025)
    adagc          each tensor to a multiple of its own moving mean (AdaGC, Wang et al. 2025)

A kind that treats all gradients as one finds a limit on the host, from the global norm that all ranks gathered; the
optimizer then takes clipping as a factor. A kind that treats each tensor finds factors on the device, from norms of
whole tensors. So ranks cannot clip differently, however the parameters are spread.
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
from pantheraml.engine import optim
from pantheraml.engine.guard.norms import Spread
from pantheraml.engine.guard.statistics import MovingStatistics
from pantheraml.parallel.exchange import all_gather_json
from pantheraml.specs.train import StabilityConfig

State = dict[str, Any]

SMALLEST_WEIGHTS = 1e-3
"""What adaptive clipping takes for the norm of weights that are (nearly) zero, as half of an adapter's begin."""


class Clipping(Protocol):
    """One kind, with what it has learnt."""

    def clip(self, optimizer: Optimizer, norm: float) -> None:
        """Have the next step see clipped gradients; `norm` is that of all gradients, which is finite."""
        ...

    def to_state(self) -> State:
        """A collective where stages of a pipeline have learnt different things; the same on all ranks."""
        ...

    def from_state(self, state: Mapping[str, Any]) -> None: ...


def build_clipping(config: StabilityConfig, max_grad_norm: float, spread: Spread) -> Clipping:
    match config.clipping:
        case "none":
            return GlobalNorm(0.0, spread)
        case "global_norm":
            return GlobalNorm(max_grad_norm, spread)
        case "percentile":
            return Percentile(config, max_grad_norm, spread)
        case "zclip":
            return ZClip(config, max_grad_norm, spread)
        case "value":
            return Value(config.clip_value, spread)
        case "norm":
            return TensorNorm(max_grad_norm, spread)
        case "adaptive":
            return Adaptive(config.clip_weight_ratio, spread)
        case "adagc":
            return AdaGC(config, max_grad_norm, spread)


class Forgetful:
    """The state of a kind that learns nothing."""

    def to_state(self) -> State:
        return {}

    def from_state(self, state: Mapping[str, Any]) -> None:
        pass


# All gradients as one -------------------------------------------------------------------------------------------------


class GlobalNorm(Forgetful):
    def __init__(self, limit: float, spread: Spread) -> None:
        self._limit, self._spread = limit, spread

    def clip(self, optimizer: Optimizer, norm: float) -> None:
        optim.clip(optimizer, self._spread.parts, norm, self._limit)


class Percentile:
    def __init__(self, config: StabilityConfig, warmup_limit: float, spread: Spread) -> None:
        self._percentile, self._warmup = config.clip_percentile, min(config.clip_warmup_steps, config.clip_history)
        self._norms: deque[float] = deque(maxlen=config.clip_history)
        self._warmup_limit, self._spread = warmup_limit, spread

    def clip(self, optimizer: Optimizer, norm: float) -> None:
        learnt = len(self._norms) >= self._warmup
        limit = float(np.percentile(self._norms, self._percentile)) if learnt else self._warmup_limit
        optim.clip(optimizer, self._spread.parts, norm, limit)
        # As it came: remembering clipped norms would let the limit only fall.
        self._norms.append(norm)

    def to_state(self) -> State:
        return {"norms": list(self._norms)}

    def from_state(self, state: Mapping[str, Any]) -> None:
        self._norms.clear()
        self._norms.extend(state["norms"])


class ZClip:
    def __init__(self, config: StabilityConfig, warmup_limit: float, spread: Spread) -> None:
        self._threshold, self._warmup_limit, self._spread = config.clip_zscore, warmup_limit, spread
        self._norms = MovingStatistics(decay=config.clip_decay, warmup=config.clip_warmup_steps)

    def clip(self, optimizer: Optimizer, norm: float) -> None:
        limit = self._limit(norm)
        optim.clip(optimizer, self._spread.parts, norm, limit)
        self._norms.add(min(norm, limit) if limit > 0 else norm)

    def _limit(self, norm: float) -> float:
        """0 is none. The further out a norm lies, the nearer to the mean it is brought."""
        if not self._norms.ready:
            return self._warmup_limit
        score = self._norms.score(norm)
        if score <= self._threshold:
            return 0.0
        return self._norms.mean + self._threshold**2 / score * self._norms.spread

    def to_state(self) -> State:
        return self._norms.to_state()

    def from_state(self, state: Mapping[str, Any]) -> None:
        self._norms.from_state(state)


# Each value, each tensor ----------------------------------------------------------------------------------------------


class Value(Forgetful):
    def __init__(self, largest: float, spread: Spread) -> None:
        self._largest, self._spread = largest, spread

    def clip(self, optimizer: Optimizer, norm: float) -> None:
        optim.clip(optimizer, self._spread.parts, norm, 0.0)
        gradients = [gradient for gradient in self._spread.gradients() if gradient is not None]
        torch._foreach_clamp_max_(gradients, self._largest)
        torch._foreach_clamp_min_(gradients, -self._largest)


class TensorNorm(Forgetful):
    def __init__(self, limit: float, spread: Spread) -> None:
        self._limit, self._spread = limit, spread

    def clip(self, optimizer: Optimizer, norm: float) -> None:
        optim.clip(optimizer, self._spread.parts, norm, 0.0)
        if self._limit > 0:
            norms = self._spread.norms(self._spread.gradients())
            _scale(self._spread, _factors(norms, torch.full_like(norms, self._limit)))


class Adaptive(Forgetful):
    def __init__(self, ratio: float, spread: Spread) -> None:
        self._ratio, self._spread = ratio, spread

    def clip(self, optimizer: Optimizer, norm: float) -> None:
        optim.clip(optimizer, self._spread.parts, norm, 0.0)
        norms = self._spread.norms(self._spread.gradients())
        weights = self._spread.norms(self._spread.weights()).clamp(min=SMALLEST_WEIGHTS)
        _scale(self._spread, _factors(norms, self._ratio * weights))


class AdaGC:
    """While norms are learnt their plain mean is taken, not the smallest as in the paper: the gradient of half of an
    adapter is zero in the first step, and would stay so."""

    def __init__(self, config: StabilityConfig, warmup_limit: float, spread: Spread) -> None:
        self._growth, self._decay, self._warmup = config.clip_growth, config.clip_decay, config.clip_warmup_steps
        self._warmup_limit, self._spread = warmup_limit, spread
        self._steps = 0
        self._means = torch.zeros_like(spread.norms([None] * len(spread.parts)))

    def clip(self, optimizer: Optimizer, norm: float) -> None:
        norms = self._spread.norms(self._spread.gradients())
        learnt = self._steps >= self._warmup
        self._steps += 1
        if learnt:
            optim.clip(optimizer, self._spread.parts, norm, 0.0)
            # A tensor that had no gradient so far has no limit either.
            known = torch.where(self._means > 0, self._growth * self._means, torch.inf)
            factors = _factors(norms, known)
            _scale(self._spread, factors)
            keep = self._decay
        else:
            optim.clip(optimizer, self._spread.parts, norm, self._warmup_limit)
            factors = torch.full_like(norms, optim.clip_factor(norm, self._warmup_limit))
            keep = 1 - 1 / self._steps
        self._means = keep * self._means + (1 - keep) * factors * norms

    def to_state(self) -> State:
        means = dict(zip(self._spread.names, self._means.tolist(), strict=True))
        if self._spread.layout.dims.pipeline > 1:
            means = {name: mean for own in all_gather_json(means) for name, mean in own.items()}
        return {"steps": self._steps, "means": means}

    def from_state(self, state: Mapping[str, Any]) -> None:
        missing = [name for name in self._spread.names if name not in state["means"]]
        if missing:
            raise CheckpointError(
                f"The checkpoint knows no mean gradient norm of `{missing[0]}`, which this run trains.",
                todo="Resume with the configuration that wrote the checkpoint.",
            )
        self._steps = state["steps"]
        self._means = self._means.new_tensor([state["means"][name] for name in self._spread.names])


def _factors(norms: Tensor, limits: Tensor) -> Tensor:
    """What brings each norm down to its limit; 1 where it is within, and never below 0 or NaN for a norm of 0."""
    return torch.where(norms > limits, limits / norms, 1.0)


def _scale(spread: Spread, factors: Tensor) -> None:
    """Each gradient by its own factor, which stays on the device."""
    pairs = [
        (gradient, factor.to(gradient.device))
        for gradient, factor in zip(spread.gradients(), factors.float().unbind(), strict=True)
        if gradient is not None and gradient.numel() > 0
    ]
    if pairs:
        gradients, own = zip(*pairs, strict=True)
        torch._foreach_mul_(list(gradients), list(own))
