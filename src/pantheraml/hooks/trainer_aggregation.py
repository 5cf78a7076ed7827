"""Gradient aggregation other than the mean in transformers' trainer, whose DDP wrapper accelerate makes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pantheraml.base.errors import ConfigError
from pantheraml.parallel.aggregate import Finish, attach, no_op_finish
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
    def _is_mean(self) -> bool:
        return self._config.aggregation == "mean" and not self._config.leave_out_nonfinite

    def before_backward(self, model: nn.Module, batch: Any) -> None:
        """Attach to the wrapper of `model`, once, and count what the batch adds to the step."""
        if self._is_mean:
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
        if self._is_mean or self._finish is no_op_finish:
            return ()
        if targets is None:
            raise ConfigError(
                f"The gradient aggregation `{self._config.aggregation}` needs a loss that is a mean over the tokens"
                " of all ranks, which this model or loss does not give.",
                fix="Use aggregation='mean', or the trainer's own loss.",
            )
        # the loss of this rank was its sum over tokens, divided by the tokens of all ranks, times the number of ranks
        return self._finish(target_tokens=own, factor=ranks / max(1, int(targets)))
