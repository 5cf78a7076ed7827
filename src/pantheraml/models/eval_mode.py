"""Run a model in eval mode without gradients, and restore its modes."""

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
