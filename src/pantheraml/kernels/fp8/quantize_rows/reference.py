"""Torch reference of row-wise quantization."""

from __future__ import annotations

from torch import Tensor

from pantheraml.kernels.fp8.e4m3 import row_scale, to_e4m3


def reference_quantize_rows(x: Tensor, multiplier: Tensor | None = None) -> tuple[Tensor, Tensor]:
    values = x.float() if multiplier is None else x.float() * multiplier
    scales = row_scale(values)
    return to_e4m3(values * (1 / scales)[:, None]), scales
