"""Training loop for any `nn.Module` and DataLoader, as the trainers of such modules run it: an epoch at a time.

A step is the mean loss over the global batch: over its target tokens if batches have `labels`, else over its samples.
It may be accumulated over several batches of each rank. Ranks say how many targets they have before the first backward,
so uneven batches give the weights of one process. The guard of custom loops then decides for all ranks whether the step
is taken.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from pantheraml.base import log
from pantheraml.base.errors import ConfigError
from pantheraml.engine.batch_size import ForwardInputs
from pantheraml.engine.guard.own_loop import OwnLoopGuard, scaled_rates, stop_error
from pantheraml.engine.multi_gpu_wrapper import MultiGPUWrapper
from pantheraml.engine.to_device import move_batch
from pantheraml.parallel.aggregate import Finish
from pantheraml.parallel.data import without_sync
from pantheraml.parallel.process_group import World
from pantheraml.specs.train import StabilityConfig

logger = log.get(__name__)

LossFunction = Callable[[Any, Any], Tensor]
IGNORED = -100
"""Label of a position that is not a target, as in torch's cross entropy."""


def check_loop_arguments(loss_fn: LossFunction | None, max_grad_norm: float | None) -> None:
    """Raise ConfigError for arguments that a `ModuleLoop` could not train with."""
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ConfigError(f"max_grad_norm={max_grad_norm!r} is not a positive number.", fix="None: no clipping.")
    reduction = getattr(loss_fn, "reduction", "mean")
    if reduction != "mean":
        raise ConfigError(
            f"loss_fn has reduction={reduction!r}, but a step is a mean over samples.", fix="Use reduction='mean'."
        )


@dataclass(frozen=True)
class _Part:
    """A batch of this rank, one of those that make a step."""

    batch: Any
    targets: float
    rows: int
    """Its samples; 0 if another rank has them."""


class ModuleLoop:
    def __init__(
        self,
        wrapper: MultiGPUWrapper,
        model: nn.Module,
        optimizer: Optimizer,
        finish: Finish,
        *,
        loss_fn: LossFunction | None,
        stability: StabilityConfig,
        max_grad_norm: float | None,
        accumulate: int = 1,
    ) -> None:
        """`model` was wrapped by `wrapper`; `finish` completes the aggregation of its gradients. A collective.

        `accumulate`: batches of each rank in a step; the last step of an epoch may have fewer.
        """
        assert wrapper.inner is not None, "the model is wrapped first"
        self._wrapper, self._model, self._optimizer = wrapper, model, optimizer
        self._finish, self._loss_fn, self._accumulate = finish, loss_fn, accumulate
        self._world: World = wrapper.peers(model)
        self._guard = OwnLoopGuard(stability, max_grad_norm or 0.0, wrapper.inner, self._world)
        self._steps = 0

    def run(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """Train on every batch of `loader`, this rank's part of the data; return statistics of all ranks."""
        self._model.train()
        started, losses, counted, samples, skipped, first = time.perf_counter(), 0.0, 0.0, 0, 0, self._steps
        norm = 0.0
        parts = (self._part(batch) for batch in loader)
        while step := list(itertools.islice(parts, self._accumulate)):
            loss, count, norm, taken = self._step(step)
            losses, counted = losses + loss * count, counted + count
            samples += sum(part.rows for part in step)
            skipped += not taken
        if counted == 0:
            raise ConfigError("The DataLoader has no batch with a target.", fix="Check the dataset, and its labels.")
        seconds = time.perf_counter() - started
        everyone = int(self._world.gather([float(samples)]).sum())
        return {
            "loss": losses / counted,
            "steps": self._steps - first,
            "skipped_steps": skipped,
            "samples": everyone,
            "seconds": seconds,
            "samples_per_second": everyone / seconds,
            "grad_norm": norm,
        }

    def _part(self, batch: Any) -> _Part:
        targets = self._targets(batch)
        if targets == 0 and self._wrapper.batch_share > 0:
            # the mean over no target is NaN, also with weight 0
            batch = {**batch, "labels": torch.zeros_like(batch["labels"])}
        return _Part(batch, targets, (ForwardInputs((batch,), {}).rows or 0) if self._wrapper.batch_share > 0 else 0)

    def _step(self, parts: list[_Part]) -> tuple[float, float, float, bool]:
        """Train on `parts`; return the global loss, its number of targets, the gradient norm, and if it was taken."""
        self._optimizer.zero_grad()
        own = sum(part.targets for part in parts)
        total = float(self._world.gather([own]).sum())
        if total == 0:
            raise ConfigError(
                f"Step {self._steps + 1} has no target: every label is {IGNORED}.", fix="Leave such samples out."
            )
        mean = torch.zeros(())
        for part in parts:
            with without_sync(self._model) if part is not parts[-1] else contextlib.nullcontext():
                mean = mean.to(loss := self._backward(part, part.targets * self._world.size / total)) + loss
        self._finish(target_tokens=own, factor=self._world.size / total)
        numbers, verdict = self._guard.judge(mean)
        self._steps += 1
        if verdict.action == "stop":
            self._guard.drop_gradients()
            raise stop_error(self._steps, verdict, settings="NaNHandlingConfig")
        if verdict.anomaly is not None:
            logger.warning("step %d: %s (%s)", self._steps, verdict.action, verdict.cause)
        taken = verdict.action in ("step", "zero")
        if taken:
            norm = self._guard.zero_nonfinite() if verdict.action == "zero" else numbers.grad_norm
            self._guard.clip(self._optimizer, norm)
            with scaled_rates(self._optimizer, verdict.rate_factor):
                self._optimizer.step()
        self._guard.drop_gradients()
        return numbers.loss, total, numbers.grad_norm, taken

    def _backward(self, part: _Part, share: float) -> Tensor:
        """Add the gradients of `part`; return its contribution to the step's loss."""
        device = self._wrapper.device
        self._wrapper.batch_share = share
        try:
            loss = self._loss(part.batch if device is None else move_batch(part.batch, device))
            (loss * share if self._world.size == 1 else loss).backward()  # of ranks, the wrapper weighs the gradients
        finally:
            self._wrapper.batch_share = 1.0
        return loss.detach() * share

    def _targets(self, batch: Any) -> float:
        """Return how much this rank's batch counts: target tokens, samples, or its share if neither can be counted."""
        if self._wrapper.batch_share == 0:
            return 0.0  # a sample that another rank has, so that this one joins the collectives
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if isinstance(labels, Tensor) and not labels.is_floating_point():
            if labels.dim() > 1 and getattr(self._wrapper.inner, "loss_type", None) == "ForCausalLM":
                labels = labels[..., 1:]  # the first token of a row is no target
            return float((labels != IGNORED).sum())
        return float(ForwardInputs((batch,), {}).rows or self._wrapper.batch_share)

    def _loss(self, batch: Any) -> Tensor:
        if self._loss_fn is not None:
            inputs, targets = _inputs_and_targets(batch)
            loss = self._loss_fn(self._model(inputs), targets)
        else:
            output = self._model(**batch) if isinstance(batch, Mapping) else self._model(*_as_tuple(batch))
            loss = _loss_of(output)
        loss = loss.mean()  # DataParallel gathers one loss per GPU
        if not loss.requires_grad:
            raise ConfigError(
                "The loss does not depend on any trainable parameter.",
                fix="Unfreeze parameters, or add adapters; and do not detach the loss.",
            )
        return loss


def _as_tuple(batch: Any) -> tuple[Any, ...]:
    return tuple(batch) if isinstance(batch, list | tuple) else (batch,)


def _inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return batch[0], batch[1]
    raise ConfigError(
        f"loss_fn needs batches of (inputs, targets), but this one is a {type(batch).__name__}.",
        fix="Return pairs from the DataLoader's collate_fn, or let the model return its loss, without loss_fn.",
    )


def _loss_of(output: Any) -> Tensor:
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(output, Tensor) and output.dim() == 0:
        found = output
    if isinstance(found, Tensor):
        return found
    raise ConfigError(
        f"The model returns no loss, but a {type(output).__name__}.",
        fix="Pass loss_fn=, such as torch.nn.CrossEntropyLoss(), or return a dict with `loss`; for a language model,"
        " add `labels` to the batches.",
    )
