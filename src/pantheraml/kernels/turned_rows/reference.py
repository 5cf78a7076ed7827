"""The definition."""

from __future__ import annotations

import torch
from torch import Tensor

from pantheraml.kernels.e4m3 import LARGEST, power_scale, to_e4m3


def reference_turned_rows(payload: Tensor, factors: Tensor | None, out: Tensor) -> Tensor | None:
    """Into `out` [columns, rows or more], zeros behind the rows. Returns the scales."""
    rows = payload.shape[0]
    out.view(torch.uint8)[:, rows:] = 0
    if factors is None:
        out.view(torch.uint8)[:, :rows] = payload.view(torch.uint8).T
        return None
    values = payload.float() * factors[:, None]
    scales = power_scale(values.abs().amax(dim=0), LARGEST)
    out[:, :rows] = to_e4m3(values * (1 / scales)).T
    return scales
