"""Looking at a model without changing it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from pantheraml.models.unread import read_stacked_in_turn


@contextlib.contextmanager
def observed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients inside; afterwards every module is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), read_stacked_in_turn(model):
            yield
    finally:
        for module, training in modes:
            module.training = training
