"""Copy tensors to host memory before a save, so that training continues while a thread writes them to disk.

Buffers are reused by the next save: allocating pinned memory, which device copies need for full speed, is slow.
"""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopies:
    def __init__(self, device: torch.device) -> None:
        """`device` holds the tensors to copy."""
        self._device = device
        self._copies: dict[str, Tensor] = {}

    def take(self, name: str, tensor: Tensor) -> Tensor:
        """Start an asynchronous copy, valid after `wait`. Overwrites the previous copy of the same name."""
        copy = self._copies.get(name)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._device.type == "cuda")
            self._copies[name] = copy
        return copy.copy_(tensor.detach(), non_blocking=True)

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
