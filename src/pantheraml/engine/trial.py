"""The first steps of a run, for comparison: their losses, the first gradient, the weights they end with.

Two trials of the same config on the same data see the same global batches, however many processes take part and however
the model is divided; so they have to come to the same numbers. For that, dropout is off: each process draws its own.
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
from pantheraml.engine.feed import Feed
from pantheraml.engine.schedule import learning_rate
from pantheraml.engine.step import Stepper
from pantheraml.models.dropout import remove_dropout, remove_dropout_from_configs
from pantheraml.parallel.gather import full_tensors, spread_like
from pantheraml.parallel.process_group import World
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.plan import Plan
from pantheraml.specs.train import TrainConfig

SMALL = 1e-3
"""Gradients smaller than this part of the whole are measured against this part: a tensor that hardly learns has hardly
any digits."""


@dataclass(frozen=True)
class Trial:
    losses: list[float]
    gradient: Mapping[str, Tensor]
    """Of the first step, by parameter, whole and on the CPU; empty on all ranks but 0."""
    weights: Mapping[str, Tensor]
    """After the last step; likewise."""
    seconds: float
    """Median of the steps after the first."""
    without: frozenset[str] = frozenset()
    """Dropout that was taken out, by the names of settings if it has any."""


def trial(
    model: nn.Module, config: TrainConfig, plan: Plan, world: World, dataset: TokenDataset, *, steps: int
) -> Trial:
    """Take `steps` steps. A collective of all ranks of `world`; the model is spread over them in place."""
    held = remove_dropout(model)  # stages of a pipeline copy what their modules hold
    stepper = Stepper(model, config, world, plan)
    settings = remove_dropout_from_configs(model)  # only now: context parallelism is refused for what they say
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
                gradient = _copied(dict(full_tensors(_gradients(stepper), world.layout, world.patient_group)))
            stepper.apply(report.numbers, learning_rate(config.train, step, steps))
            losses.append(report.numbers.loss)
            times.append(time.perf_counter() - begin)
    weights = dict(full_tensors(stepper.parameters, world.layout, world.patient_group))
    return Trial(losses, gradient, _copied(weights), statistics.median(times[1:] or times), settings or held)


def trial_feed(dataset: TokenDataset, world: World, config: TrainConfig, plan: Plan) -> Feed:
    shares = shares_by_hand(config, world.layout.dims)
    return Feed(
        dataset,
        world,
        seed=config.train.seed,
        global_batch=config.train.global_batch_size,
        micro_batch=plan.micro_batch_size,
        limit=None,
        weights_at=lambda step: shares,
    )


def shares_by_hand(config: TrainConfig, dims: ParallelDims) -> list[int] | None:
    """`parallel.batch_shares`, where they are sizes for as many shares of a batch as `dims` has; None is evenly."""
    shares = config.parallel.batch_shares
    return shares if isinstance(shares, list) and len(shares) == dims.data else None


@dataclass(frozen=True)
class Difference:
    """Between two trials, relative."""

    loss: float
    gradient: float
    weights: float


def difference(found: Trial, expected: Trial) -> Difference:
    assert found.gradient.keys() == expected.gradient.keys(), "the two trials train other weights"
    losses = [abs(a - b) / abs(b) for a, b in zip(found.losses, expected.losses, strict=True)]
    return Difference(
        loss=max(losses),
        gradient=_worst(found.gradient, expected.gradient),
        weights=_overall(found.weights, expected.weights),
    )


def _worst(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest relative difference of a tensor."""
    norms = {name: float(tensor.double().norm()) for name, tensor in expected.items()}
    least = SMALL * sum(norm**2 for norm in norms.values()) ** 0.5
    apart = {name: float((found[name].double() - tensor.double()).norm()) for name, tensor in expected.items()}
    worst = [apart[name] / max(norm, least) if least else apart[name] for name, norm in norms.items()]
    # max() would let NaN pass
    return float(torch.tensor(worst, dtype=torch.float64).max()) if worst else 0.0


def _overall(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Of all tensors as one. Not tensor by tensor: Adam makes a full step of a gradient that is nothing but rounding
    (that of GPT-2's key biases, which do not matter to attention)."""
    apart = sum(float((found[name].double() - tensor.double()).square().sum()) for name, tensor in expected.items())
    return math.sqrt(apart / sum(float(tensor.double().square().sum()) for tensor in expected.values()))


def _gradients(stepper: Stepper) -> list[tuple[str, Tensor]]:
    found = []
    for (name, parameter), (_, part) in zip(stepper.parameters, stepper.parts, strict=True):
        gradient = torch.zeros_like(part) if part.grad is None else part.grad
        found.append((name, spread_like(gradient, parameter)))
    return found


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On a CPU the tensors are the training's own, which the next step overwrites."""
    return {name: tensor.clone() for name, tensor in tensors.items()}
