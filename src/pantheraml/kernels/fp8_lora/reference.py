"""The definition, in the dtype of its inputs: what the op must agree with, up to fp8's rounding."""

from __future__ import annotations

from torch import Tensor


def reference_lora_linear(x: Tensor, weight: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
    return x @ weight.T + scaling * (x @ down.T) @ up.T
