"""The few numbers of a step on their way from the device to the host.

The host asks for them while a GPU is at work, does something else, and waits only then. They arrive in page-locked
memory, which the GPU writes by itself; and what it is given to do after them is not waited for.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST = 16
"""Numbers of an ordinary step are fewer; for more, memory is taken when they come."""


class Readout:
    """One at a time: what was sent is to be read before more is."""

    def __init__(self, device: torch.device) -> None:
        self._arrival = torch.cuda.Event() if device.type == "cuda" else None
        self._room = _host_memory(MOST, device)
        self._sent: Tensor | None = None

    def send(self, numbers: Tensor) -> None:
        """A float64 vector; the host does not wait for it."""
        if self._arrival is None or numbers.device.type != "cuda":
            self._sent = numbers
            return
        if len(numbers) > len(self._room):
            self._room = _host_memory(len(numbers), numbers.device)
        self._sent = self._room[: len(numbers)].copy_(numbers, non_blocking=True)
        self._arrival.record(torch.cuda.current_stream(numbers.device))

    def has_arrived(self) -> bool:
        return self._arrival is None or self._arrival.query()

    def read(self) -> list[float]:
        """Waits for what was sent."""
        assert self._sent is not None, "something was sent"
        if self._arrival is not None:
            self._arrival.synchronize()
        numbers: list[float] = self._sent.tolist()
        self._sent = None
        return numbers


def _host_memory(numbers: int, device: torch.device) -> Tensor:
    return torch.empty(numbers, dtype=torch.float64, pin_memory=device.type == "cuda")
