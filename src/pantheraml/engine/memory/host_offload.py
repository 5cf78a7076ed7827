"""Activation offloading: tensors in host memory between a layer's forward and backward.

On a GPU, copies overlap with computation on a side stream: out while the layer runs forward, and back one layer ahead
of backward. Host buffers are pinned, which is slow to allocate, so they are allocated in the first step and reused, at
most one per layer. On a CPU the same happens without streams.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from pantheraml.base.errors import OutOfMemoryError

RESERVE = 0.1
"""Fraction of host memory left free: pinned memory is unavailable to every other process."""


class HostStore:
    """Host buffers of one model's layers, and the order in which backward needs them."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._bytes = 0
        self._newest: weakref.ref[OffloadedTensor] | None = None
        self._pending: _PendingCopy | None = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def bytes(self) -> int:
        """Host memory allocated, in use or free."""
        return self._bytes

    def offload(self, tensor: Tensor) -> OffloadedTensor:
        """Start copying `tensor` out. The first `take` returns the tensor itself, later ones a copy from the host."""
        previous = None if self._newest is None else self._newest()
        self.settle()
        buffer = self._buffer(tensor)
        offloaded = OffloadedTensor(self, tensor, buffer, previous)
        weakref.finalize(offloaded, self._free.append, buffer).atexit = False
        self._newest = weakref.ref(offloaded)
        host = _view(buffer, tensor.shape, tensor.dtype)
        if tensor.is_cuda:
            side = self.side_stream(tensor.device)
            side.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(side):
                host.copy_(tensor.detach(), non_blocking=True)
            self._pending = _PendingCopy(tensor.detach(), side.record_event())
        else:
            host.copy_(tensor.detach())
        return offloaded

    def settle(self) -> None:
        """Release the tensor that was copied out last. By the next layer its copy is done, so waiting costs nothing.

        Its memory is then reused in the order of the compute stream, without `record_stream`.
        """
        if self._pending is not None:
            torch.cuda.current_stream(self._pending.tensor.device).wait_event(self._pending.done)
            self._pending = None

    def side_stream(self, device: torch.device) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def _buffer(self, tensor: Tensor) -> Tensor:
        size = tensor.numel() * tensor.element_size()
        fitting = [index for index, buffer in enumerate(self._free) if buffer.numel() >= size]
        if fitting:
            return self._free.pop(min(fitting, key=lambda index: self._free[index].numel()))
        if self._free:  # replace one that is too small, so that their number does not grow with sequence lengths
            self._bytes -= self._free.pop().numel()
        return self._allocate(size, pin=tensor.is_cuda)

    def _allocate(self, size: int, *, pin: bool) -> Tensor:
        memory = psutil.virtual_memory()
        if memory.available - size < RESERVE * memory.total:
            raise self._out_of_memory(size, f"only {memory.available / 2**30:.2f} GiB are free")
        try:
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
        except RuntimeError as err:  # the driver may refuse to pin memory that is free
            raise self._out_of_memory(size, str(err).strip().splitlines()[0]) from err
        self._bytes += size
        return buffer

    def _out_of_memory(self, size: int, reason: str) -> OutOfMemoryError:
        return OutOfMemoryError(
            f"Not enough host memory to offload activations: {size / 2**30:.2f} GiB more are needed beside the"
            f" {self._bytes / 2**30:.2f} GiB in use, and {reason}.",
            fix="Use train.activation_checkpointing=full, or a smaller train.micro_batch_size.",
        )


@dataclass(frozen=True)
class _PendingCopy:
    """A device tensor whose copy to the host may still run."""

    tensor: Tensor
    done: torch.cuda.Event


class OffloadedTensor:
    """One tensor in a `HostStore`."""

    def __init__(self, store: HostStore, tensor: Tensor, buffer: Tensor, previous: OffloadedTensor | None) -> None:
        self._store, self._buffer = store, buffer
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device
        self._requires_grad = tensor.requires_grad
        self._original: Tensor | None = tensor
        self._previous = None if previous is None else weakref.ref(previous)
        self._fetched: Tensor | None = None
        self._fetch_done: torch.cuda.Event | None = None

    def take(self) -> Tensor:
        """Return the original tensor in forward; from the second call on, the fetched copy for backward."""
        if self._original is not None:
            original, self._original = self._original, None
            return original
        self._store.settle()
        self.fetch()
        previous = None if self._previous is None else self._previous()
        if previous is not None:
            previous.fetch()
        tensor, self._fetched = self._fetched, None
        assert tensor is not None
        if self._fetch_done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._fetch_done)
        return tensor.requires_grad_(self._requires_grad)

    def fetch(self) -> None:
        """Start copying back, unless already started."""
        if self._fetched is not None:
            return
        host = _view(self._buffer, self._shape, self._dtype)
        self._fetched = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        if self._device.type != "cuda":
            self._fetched.copy_(host)
            return
        side = self._store.side_stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))  # its kernels may still use the memory just allocated
        with torch.cuda.stream(side):
            self._fetched.copy_(host, non_blocking=True)
        self._fetch_done = side.record_event()


def _view(buffer: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return buffer[: shape.numel() * dtype.itemsize].view(dtype).view(shape)
