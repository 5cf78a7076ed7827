"""Training loop for any `nn.Module` and DataLoader, as `MultiGPUTrainer` runs it: an epoch at a time.

A step is the mean loss over the global batch: over its target tokens if batches have `labels`, else over its samples.
Ranks say how many of them they have before each backward, so uneven batches give the weights of one process. The guard
of custom loops then decides for all ranks whether the step is taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from pantheraml.base import log
from pantheraml.base.errors import ConfigError
from pantheraml.engine.batch_size import Inputs
from pantheraml.engine.guard.own_loop import OwnLoopGuard, scaled_rates, stop_error
from pantheraml.engine.multi_gpu_wrapper import MultiGPUWrapper
from pantheraml.engine.to_device import move_batch
from pantheraml.parallel.aggregate import Finish
from pantheraml.parallel.process_group import World
from pantheraml.specs.train import StabilityConfig

logger = log.get(__name__)

LossFunction = Callable[[Any, Any], Tensor]
IGNORED = -100
"""Label of a position that is not a target, as in torch's cross entropy."""


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
    ) -> None:
        """`model` was wrapped by `wrapper`; `finish` completes the aggregation of its gradients. A collective."""
        assert wrapper.inner is not None, "the model is wrapped first"
        self._wrapper, self._model, self._optimizer = wrapper, model, optimizer
        self._finish, self._loss_fn = finish, loss_fn
        self._world: World = wrapper.peers(model)
        self._guard = OwnLoopGuard(stability, max_grad_norm or 0.0, wrapper.inner, self._world)
        self._steps = 0

    def run(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """Train on every batch of `loader`, this rank's part of the data; return statistics of all ranks."""
        self._model.train()
        started, losses, counted, samples, skipped, first = time.perf_counter(), 0.0, 0.0, 0, 0, self._steps
        norm = 0.0
        for batch in loader:
            rows = Inputs((batch,), {}).rows or 0
            loss, count, norm, taken = self._step(batch)
            losses, counted = losses + loss * count, counted + count
            samples += rows if self._wrapper.batch_share > 0 else 0
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

    def _step(self, batch: Any) -> tuple[float, float, float, bool]:
        """Train on `batch`; return the global loss, its number of targets, the gradient norm, and if it was taken."""
        self._optimizer.zero_grad()
        own = self._targets(batch)
        total = float(self._world.gather([own]).sum())
        if total == 0:
            raise ConfigError(
                f"Step {self._steps + 1} has no target: every label is {IGNORED}.", fix="Leave such samples out."
            )
        if own == 0 and self._wrapper.batch_share > 0:
            # the mean over no target is NaN, also with weight 0
            batch = {**batch, "labels": torch.zeros_like(batch["labels"])}
        self._wrapper.batch_share = own * self._world.size / total
        device = self._wrapper.device
        loss = self._loss(batch if device is None else move_batch(batch, device))
        loss.backward()
        self._finish(target_tokens=own, factor=self._world.size / total)
        numbers, verdict = self._guard.judge(loss.detach() * self._wrapper.batch_share)
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

    def _targets(self, batch: Any) -> float:
        """Return how much this rank's batch counts: target tokens, samples, or its share if neither can be counted."""
        if self._wrapper.batch_share == 0:
            return 0.0  # a sample that another rank has, so that this one joins the collectives
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if isinstance(labels, Tensor) and not labels.is_floating_point():
            if labels.dim() > 1 and getattr(self._wrapper.inner, "loss_type", None) == "ForCausalLM":
                labels = labels[..., 1:]  # the first token of a row is no target
            return float((labels != IGNORED).sum())
        return float(Inputs((batch,), {}).rows or self._wrapper.batch_share)

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
