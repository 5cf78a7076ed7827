"""Run a model in eval mode without gradients, or without activation checkpointing, and restore its modes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from pantheraml.models.lazy_weights import materialize_stacked_per_layer


@contextlib.contextmanager
def eval_no_grad(model: nn.Module) -> Iterator[None]:
    """Eval mode and no_grad inside; afterwards every module has its previous mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), materialize_stacked_per_layer(model):
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def without_checkpointing(model: nn.Module) -> Iterator[None]:
    """Suspend activation checkpointing.

    In training mode, checkpointed layers of transformers drop the key/value cache: all but the first new token would be
    generated from the last token alone.
    """
    checkpointed = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    for module in checkpointed:
        module.gradient_checkpointing = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in checkpointed:
            module.gradient_checkpointing = True  # type: ignore[assignment]
