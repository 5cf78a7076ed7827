"""The definitions, in plain torch: also what runs on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pantheraml.kernels.e4m3 import LARGEST, power_scale, to_e4m3


def reference_weight_scale(weights: Sequence[Tensor]) -> Tensor:
    """One number."""
    largest = torch.stack([weight.detach().abs().amax().float() for weight in weights]).amax()
    return power_scale(largest, LARGEST)


def reference_weight_to_e4m3(weight: Tensor, scale: Tensor, out: Tensor) -> None:
    out.copy_(to_e4m3(weight.detach().float() / scale))
