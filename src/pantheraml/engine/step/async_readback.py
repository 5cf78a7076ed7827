"""Asynchronous device-to-host copy of the few scalars of a step.

The copy into pinned memory is queued while the GPU is busy; the host does other work and synchronizes later, on an
event, so it does not wait for kernels launched after the copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

CAPACITY = 16
"""Initial buffer size, enough for an ordinary step; the buffer grows on demand."""


class AsyncReadback:
    """Holds one transfer at a time: read before the next `send`."""

    def __init__(self, device: torch.device) -> None:
        self._arrival = torch.cuda.Event() if device.type == "cuda" else None
        self._buffer = _host_buffer(CAPACITY, device)
        self._sent: Tensor | None = None

    def send(self, numbers: Tensor) -> None:
        """Start copying a float64 vector, without synchronizing."""
        if self._arrival is None or numbers.device.type != "cuda":
            self._sent = numbers
            return
        if len(numbers) > len(self._buffer):
            self._buffer = _host_buffer(len(numbers), numbers.device)
        self._sent = self._buffer[: len(numbers)].copy_(numbers, non_blocking=True)
        self._arrival.record(torch.cuda.current_stream(numbers.device))

    def has_arrived(self) -> bool:
        return self._arrival is None or self._arrival.query()

    def read(self) -> list[float]:
        """Wait for the copy and return the numbers."""
        assert self._sent is not None, "nothing was sent"
        if self._arrival is not None:
            self._arrival.synchronize()
        numbers: list[float] = self._sent.tolist()
        self._sent = None
        return numbers


def _host_buffer(numbers: int, device: torch.device) -> Tensor:
    return torch.empty(numbers, dtype=torch.float64, pin_memory=device.type == "cuda")
