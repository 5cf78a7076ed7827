"""Copies in host memory of what is about to be saved, so that training may go on while a thread writes them.

The copies serve again at the next save: page-locked memory, which a GPU copies into at full speed, takes long to get.
"""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopies:
    def __init__(self, device: torch.device) -> None:
        """`device`: where the tensors are."""
        self._device = device
        self._copies: dict[str, Tensor] = {}

    def take(self, name: str, tensor: Tensor) -> Tensor:
        """A copy that holds the values after `wait`; the copy of this name that was taken before is overwritten."""
        copy = self._copies.get(name)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._device.type == "cuda")
            self._copies[name] = copy
        return copy.copy_(tensor.detach(), non_blocking=True)

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
