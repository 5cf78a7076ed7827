"""RNG state before a step, so that the step can be rerun with the same dropout masks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn


class RngStates:
    """RNG states of this process: the CPU's, and that of every GPU that holds a part of the model."""

    def __init__(self, model: nn.Module) -> None:
        self._devices = sorted({p.device for p in model.parameters() if p.device.type == "cuda"}, key=str)
        self.saved: list[Tensor]
        self.save()

    def save(self) -> None:
        """Save the current states: a few kilobytes. CUDA generators keep theirs on the host, so this does not sync."""
        self.saved = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._devices)]

    def restore(self) -> None:
        """Restore the saved states."""
        self.set(self.saved)

    def set(self, states: Sequence[Tensor]) -> None:
        """Set `states`, in the order of `saved`; those of missing devices are ignored."""
        host, *others = states
        torch.set_rng_state(host)
        for device, state in zip(self._devices, others, strict=False):
            torch.cuda.set_rng_state(state, device)

    def preserved(self) -> AbstractContextManager[None]:
        """Restore the current states on exit, whatever is drawn inside."""
        return torch.random.fork_rng(self._devices)
