"""Gradient aggregation other than the mean in trainers of transformers and TRL.

The trainer wraps its model in DDP itself; the communication hook is registered on that wrapper before its first
backward, and the aggregation is finished after the last backward of a step, before gradients are clipped. As in the
engine, a rank's vote is the mean gradient of its target tokens. `Aggregation` is for our own trainers, whose
`training_step` calls it; `aggregate_gradients` wraps the methods of one trainer of another class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pantheraml.base.errors import ConfigError
from pantheraml.parallel.aggregate import Finish, attach, no_op_finish
from pantheraml.specs.aggregation import Method
from pantheraml.specs.multi_gpu import MultiGPUConfig


def count_targets(batch: Any) -> torch.Tensor | int:
    """Target tokens of a batch, as the trainer counts them: labels are shifted by one."""
    labels = batch.get("shift_labels")
    if labels is None and batch.get("labels") is not None:
        labels = batch["labels"][..., 1:]
    targets: torch.Tensor | int = 0 if labels is None else labels.ne(-100).sum()
    return targets


def count_tokens(batch: Any) -> torch.Tensor | int:
    """Tokens of a batch, without padding."""
    mask, ids = batch.get("attention_mask"), batch.get("input_ids")
    if mask is not None and mask.dim() == 2:
        tokens: torch.Tensor = mask.sum()
        return tokens
    return 0 if ids is None else int(ids.numel())


class Aggregation:
    """Combines the gradients of a step as `config` says. Does nothing for the mean, which is DDP's own."""

    def __init__(self, config: MultiGPUConfig) -> None:
        self._config = config
        self._model: nn.Module | None = None
        self._finish: Finish = no_op_finish
        self._targets: torch.Tensor | int = 0

    @property
    def is_mean(self) -> bool:
        return self._config.aggregation == "mean" and not self._config.leave_out_nonfinite

    def before_backward(self, model: nn.Module, batch: Any) -> None:
        """Attach to the wrapper of `model`, once, and count what the batch adds to the step."""
        if self.is_mean:
            return
        if model is not self._model:
            config = self._config
            self._finish = attach(
                model,
                config.aggregation,
                weights=config.aggregation_weights,
                leave_out_nonfinite=config.leave_out_nonfinite,
            )
            self._model = model
        self._targets = self._targets + count_targets(batch)

    def after_last_backward(self, targets: torch.Tensor | int | None, ranks: int) -> tuple[int, ...]:
        """Combine; `targets`: of the step on all ranks. A collective. Returns the ranks that were left out."""
        own, self._targets = int(self._targets), 0
        if self.is_mean or self._finish is no_op_finish:
            return ()
        if targets is None:
            raise ConfigError(
                f"The gradient aggregation `{self._config.aggregation}` needs a loss that is a mean over the tokens"
                " of all ranks, which this model or loss does not give.",
                fix="Use aggregation='mean', or the trainer's own loss.",
            )
        # the loss of this rank was its sum over tokens, divided by the tokens of all ranks, times the number of ranks
        return self._finish(target_tokens=own, factor=ranks / max(1, int(targets)))


def aggregate_gradients(trainer: Any, method: Method, weights: tuple[float, ...] | None) -> None:
    """Make `trainer` combine gradients by `method` in every step of its training."""
    aggregation = _TrainerAggregation(trainer, method, weights)
    trainer.training_step = aggregation.training_step
    trainer._get_num_items_in_batch = aggregation.count_targets


class _TrainerAggregation:
    def __init__(self, trainer: Any, method: Method, weights: tuple[float, ...] | None) -> None:
        self._trainer, self._method, self._weights = trainer, method, weights
        self._training_step: Callable[..., Any] = trainer.training_step
        self._count: Callable[..., Any] = trainer._get_num_items_in_batch
        self._wrapped: nn.Module | None = None
        self._finish: Finish | None = None
        self._own_targets: int | None = None
        """Target tokens of this rank in the current step; None: losses are means over the samples of a rank."""
        self._all_targets = 0

    def count_targets(self, batch_samples: list[Any], device: Any) -> Any:
        """Count the target tokens of a step as the trainer does, and remember this rank's share."""
        everyone, args = self._count(batch_samples, device), self._trainer.args
        self._own_targets = None
        if everyone is not None and args.average_tokens_across_devices:
            args.average_tokens_across_devices = False
            try:
                self._own_targets = int(self._count(batch_samples, device))
            finally:
                args.average_tokens_across_devices = True
            self._all_targets = int(everyone)
        return everyone

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if model is not self._wrapped:
            self._finish, self._wrapped = self._attached(model), model
        loss = self._training_step(model, *args, **kwargs)
        if isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync:
            assert self._finish is not None
            if self._own_targets is None:
                self._finish(target_tokens=1, factor=1.0)
            else:
                # the trainer divides the sum of token losses by all target tokens, and multiplies by the ranks
                factor = self._trainer.accelerator.num_processes / max(1, self._all_targets)
                self._finish(target_tokens=self._own_targets, factor=factor)
        return loss

    def _attached(self, model: nn.Module) -> Finish:
        if not isinstance(model, DistributedDataParallel) and self._trainer.accelerator.num_processes > 1:
            raise ConfigError(
                f"gradient_aggregation={self._method!r} needs DDP, but the trainer's model is a"
                f" {type(model).__name__}.",
                fix="Train without FSDP and DeepSpeed, or use gradient_aggregation='mean'.",
            )
        return attach(model, self._method, weights=self._weights)
