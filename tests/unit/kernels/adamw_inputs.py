"""Inputs shared by the tests of the AdamW reference and its kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from pantheraml.kernels.adamw import AdamWStep


def step(count: int, **changes: float) -> AdamWStep:
    values = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
    return AdamWStep(**{**values, "count": count, "gradient_factor": 0.7, "key": 1234567 * count, **changes})  # type: ignore[arg-type]


def gradients(count: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    """Magnitudes over ten decades, more than 8-bit codes cover, and some zeros."""
    generator = torch.Generator().manual_seed(1)
    steps = []
    for _ in range(count):
        magnitudes = 10 ** (-10 * torch.rand(size, generator=generator))
        signs = torch.randint(-1, 2, (size,), generator=generator)
        steps.append((magnitudes * signs).to(dtype))
    return steps


def weights(size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
