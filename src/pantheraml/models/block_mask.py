"""Attention mask from document boundaries, for attention that takes no boundaries."""

from __future__ import annotations

import torch
from torch import Tensor


def block_mask(boundaries: Tensor, rows: int, width: int, window: int | None) -> Tensor:
    """[B, 1, S, S]: True where the key is in the query's document, not after it, and within the window."""
    position = torch.arange(rows * width, dtype=boundaries.dtype, device=boundaries.device)
    document = torch.searchsorted(boundaries, position, right=True).view(rows, width)
    distance = position[:width, None] - position[None, :width]
    near = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    return ((document[:, :, None] == document[:, None, :]) & near)[:, None]
