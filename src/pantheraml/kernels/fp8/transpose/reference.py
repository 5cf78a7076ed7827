"""Torch reference of the fp8 transpose."""

from __future__ import annotations

import torch
from torch import Tensor

from pantheraml.kernels.fp8.e4m3 import E4M3_MAX, pow2_scale, to_e4m3


def reference_fp8_transpose(qdata: Tensor, factors: Tensor | None, out: Tensor) -> Tensor | None:
    """Write to `out` [columns, padded rows], with zeros in the padding. Returns the scales."""
    rows = qdata.shape[0]
    out.view(torch.uint8)[:, rows:] = 0
    if factors is None:
        out.view(torch.uint8)[:, :rows] = qdata.view(torch.uint8).T
        return None
    values = qdata.float() * factors[:, None]
    scales = pow2_scale(values.abs().amax(dim=0), E4M3_MAX)
    out[:, :rows] = to_e4m3(values * (1 / scales)).T
    return scales
