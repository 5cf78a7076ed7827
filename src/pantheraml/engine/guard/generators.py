"""Random numbers of a step (dropout): where the generators stood before it, so that it can be taken once more."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn


class Generators:
    """Those of this process: the host's, and that of every GPU which holds a part of the model."""

    def __init__(self, model: nn.Module) -> None:
        self._devices = sorted({p.device for p in model.parameters() if p.device.type == "cuda"}, key=str)
        self.remembered: list[Tensor]
        self.remember()

    def remember(self) -> None:
        """A few kilobytes; a GPU's generator keeps its state on the host, which therefore does not wait."""
        self.remembered = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._devices)]

    def put_back(self) -> None:
        """To where they were when last remembered."""
        self.set(self.remembered)

    def set(self, states: Sequence[Tensor]) -> None:
        """To `states`, as `remembered` gives them; those of devices that are not here are left out."""
        host, *others = states
        torch.set_rng_state(host)
        for device, state in zip(self._devices, others, strict=False):
            torch.cuda.set_rng_state(state, device)

    def undisturbed(self) -> AbstractContextManager[None]:
        """Whatever is drawn inside, they stand afterwards where they stand now."""
        return torch.random.fork_rng(self._devices)
