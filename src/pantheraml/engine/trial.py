"""Trial: the first steps of a run, for comparing parallel layouts by losses, first gradient and final weights.

Two trials of the same config on the same data see the same global batches, whatever the world size and the parallel
layout, so their numbers must agree. Dropout is off for this, since each rank draws its own masks.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pantheraml.data.dataset import TokenDataset
from pantheraml.engine.optim.schedule import learning_rate
from pantheraml.engine.step.feed import Feed
from pantheraml.engine.step.step import Stepper
from pantheraml.models.dropout import remove_dropout, remove_dropout_from_configs
from pantheraml.parallel.gather import full_tensors, shard_like
from pantheraml.parallel.process_group import World
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.plan import Plan
from pantheraml.specs.train import TrainConfig

SMALL = 1e-3
"""Lower bound of the reference norm of a gradient, relative to the global norm: tensors with tiny gradients have few
significant digits."""


@dataclass(frozen=True)
class Trial:
    losses: list[float]
    gradient: Mapping[str, Tensor]
    """Gradient of the first step by parameter, unsharded, on the CPU; empty on all ranks but 0."""
    weights: Mapping[str, Tensor]
    """Weights after the last step; likewise."""
    seconds: float
    """Median time of a step, without the first."""
    without: frozenset[str] = frozenset()
    """Dropout that was removed, by setting name if there is one."""


def trial(
    model: nn.Module, config: TrainConfig, plan: Plan, world: World, dataset: TokenDataset, *, steps: int
) -> Trial:
    """Run `steps` steps. A collective of all ranks of `world`; the model is parallelized in place."""
    removed = remove_dropout(model)  # before parallelizing: pipeline stages copy their modules
    stepper = Stepper(model, config, world, plan).setup()
    settings = remove_dropout_from_configs(model)  # only now: whether context parallel is supported depends on these
    if config.method.dropout:
        settings |= {"method.dropout"}
    model.train()
    losses, times, gradient = [], [], {}
    with trial_feed(dataset, world, config, plan) as feed:
        for step in range(steps):
            batches = feed.step(step)
            begin = time.perf_counter()
            report = stepper.backward(batches, stop_requested=False)
            if step == 0:
                gradient = _copied(dict(full_tensors(_gradients(stepper), world.layout, world.long_timeout_group)))
            stepper.apply(report.numbers, learning_rate(config.train, step, steps))
            losses.append(report.numbers.loss)
            times.append(time.perf_counter() - begin)
    weights = dict(full_tensors(stepper.parameters, world.layout, world.long_timeout_group))
    return Trial(losses, gradient, _copied(weights), statistics.median(times[1:] or times), settings or removed)


def trial_feed(dataset: TokenDataset, world: World, config: TrainConfig, plan: Plan) -> Feed:
    shares = configured_shares(config, world.layout.dims)
    return Feed(
        dataset,
        world,
        seed=config.train.seed,
        global_batch=config.train.global_batch_size,
        micro_batch=plan.micro_batch_size,
        limit=None,
        weights_at=lambda step: shares,
    )


def configured_shares(config: TrainConfig, dims: ParallelDims) -> list[int] | None:
    """`parallel.batch_shares` if it lists as many sizes as `dims` has data ranks; None: equal shares."""
    shares = config.parallel.batch_shares
    return shares if isinstance(shares, list) and len(shares) == dims.data else None


@dataclass(frozen=True)
class Difference:
    """Relative difference between two trials."""

    loss: float
    gradient: float
    weights: float


def difference(actual: Trial, expected: Trial) -> Difference:
    assert actual.gradient.keys() == expected.gradient.keys(), "the two trials train different parameters"
    losses = [abs(a - b) / abs(b) for a, b in zip(actual.losses, expected.losses, strict=True)]
    return Difference(
        loss=max(losses),
        gradient=_worst(actual.gradient, expected.gradient),
        weights=_overall(actual.weights, expected.weights),
    )


def _worst(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest relative difference of any tensor."""
    norms = {name: float(tensor.double().norm()) for name, tensor in expected.items()}
    least = SMALL * sum(norm**2 for norm in norms.values()) ** 0.5
    errors = {name: float((actual[name].double() - tensor.double()).norm()) for name, tensor in expected.items()}
    worst = [errors[name] / max(norm, least) if least else errors[name] for name, norm in norms.items()]
    # max() would ignore NaN
    return float(torch.tensor(worst, dtype=torch.float64).max()) if worst else 0.0


def _overall(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Relative difference of all tensors as one. Not per tensor: Adam takes a full step along a gradient that is pure
    rounding noise (such as that of GPT-2's key biases, which do not affect attention)."""
    errors = sum(float((actual[name].double() - tensor.double()).square().sum()) for name, tensor in expected.items())
    return math.sqrt(errors / sum(float(tensor.double().square().sum()) for tensor in expected.values()))


def _gradients(stepper: Stepper) -> list[tuple[str, Tensor]]:
    gradients = []
    for (name, parameter), (_, part) in zip(stepper.parameters, stepper.parts, strict=True):
        gradient = torch.zeros_like(part) if part.grad is None else part.grad
        gradients.append((name, shard_like(gradient, parameter)))
    return gradients


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Clone: on a CPU these are the training's own tensors, which the next step overwrites."""
    return {name: tensor.clone() for name, tensor in tensors.items()}
