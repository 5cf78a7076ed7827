"""Torch reference of the weight cast, also used on CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pantheraml.kernels.fp8.e4m3 import E4M3_MAX, pow2_scale, to_e4m3


def reference_weight_scale(weights: Sequence[Tensor]) -> Tensor:
    """Scalar scale shared by all `weights`."""
    largest = torch.stack([weight.detach().abs().amax().float() for weight in weights]).amax()
    return pow2_scale(largest, E4M3_MAX)


def reference_weight_to_e4m3(weight: Tensor, scale: Tensor, out: Tensor) -> None:
    out.copy_(to_e4m3(weight.detach().float() / scale))
