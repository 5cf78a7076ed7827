"""Tensors that wait in host memory between a layer's forward and backward pass.

On a GPU, copies run on a stream of their own beside the computation: out while the layer computes, and back one layer
ahead of the backward pass. The host side is page-locked and therefore slow to get: buffers are made in the first step
and used again in all others; there are as many as layers at most. On a CPU the same happens without streams.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from pantheraml.base.errors import OutOfMemoryError

RESERVE = 0.1
"""Share of the machine's memory that stays free: page-locked memory is gone for everyone else."""


class HostStore:
    """Host buffers of one model's layers, and the order in which they will be wanted back."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._bytes = 0
        self._newest: weakref.ref[Kept] | None = None
        self._leaving: _Leaving | None = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def bytes(self) -> int:
        """Host memory held, in use or free."""
        return self._bytes

    def keep(self, tensor: Tensor) -> Kept:
        """Begin to copy `tensor` out. The first `take` gives the tensor itself, later ones what was kept of it."""
        before = None if self._newest is None else self._newest()
        self.settle()
        buffer = self._buffer(tensor)
        kept = Kept(self, tensor, buffer, before)
        weakref.finalize(kept, self._free.append, buffer).atexit = False
        self._newest = weakref.ref(kept)
        host = _view(buffer, tensor.shape, tensor.dtype)
        if tensor.is_cuda:
            side = self.side_stream(tensor.device)
            side.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(side):
                host.copy_(tensor.detach(), non_blocking=True)
            self._leaving = _Leaving(tensor.detach(), side.record_event())
        else:
            host.copy_(tensor.detach())
        return kept

    def settle(self) -> None:
        """Let go of the tensor that was copied out last: by the next layer its copy is done, and waiting costs nothing.

        Its memory is then reused in the order of the computing stream, without the allocator's help.
        """
        if self._leaving is not None:
            torch.cuda.current_stream(self._leaving.tensor.device).wait_event(self._leaving.done)
            self._leaving = None

    def side_stream(self, device: torch.device) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def _buffer(self, tensor: Tensor) -> Tensor:
        size = tensor.numel() * tensor.element_size()
        fitting = [index for index, buffer in enumerate(self._free) if buffer.numel() >= size]
        if fitting:
            return self._free.pop(min(fitting, key=lambda index: self._free[index].numel()))
        if self._free:  # one that is too small makes room, so that their number does not grow with the lengths
            self._bytes -= self._free.pop().numel()
        return self._allocate(size, pin=tensor.is_cuda)

    def _allocate(self, size: int, *, pin: bool) -> Tensor:
        memory = psutil.virtual_memory()
        if memory.available - size < RESERVE * memory.total:
            raise self._too_little(size, f"only {memory.available / 2**30:.2f} GiB are free")
        try:
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
        except RuntimeError as err:  # the driver may refuse to lock what the machine has
            raise self._too_little(size, str(err).strip().splitlines()[0]) from err
        self._bytes += size
        return buffer

    def _too_little(self, more: int, why: str) -> OutOfMemoryError:
        return OutOfMemoryError(
            f"Host memory does not suffice to offload activations: {more / 2**30:.2f} GiB more are needed beside the"
            f" {self._bytes / 2**30:.2f} GiB in use, and {why}.",
            todo="Use train.activation_checkpointing=full, or a smaller train.micro_batch_size.",
        )


@dataclass(frozen=True)
class _Leaving:
    """A device tensor whose copy to the host may still run."""

    tensor: Tensor
    done: torch.cuda.Event


class Kept:
    """One tensor that was handed to a `HostStore`."""

    def __init__(self, store: HostStore, tensor: Tensor, buffer: Tensor, before: Kept | None) -> None:
        self._store, self._buffer = store, buffer
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device
        self._wants_gradient = tensor.requires_grad
        self._original: Tensor | None = tensor
        self._before = None if before is None else weakref.ref(before)
        self._arriving: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def take(self) -> Tensor:
        """The tensor for the forward pass; from the second call on, for the backward pass."""
        if self._original is not None:
            original, self._original = self._original, None
            return original
        self._store.settle()
        self.fetch()
        before = None if self._before is None else self._before()
        if before is not None:
            before.fetch()
        tensor, self._arriving = self._arriving, None
        assert tensor is not None
        if self._arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrived)
        return tensor.requires_grad_(self._wants_gradient)

    def fetch(self) -> None:
        """Begin to copy back, unless that has begun."""
        if self._arriving is not None:
            return
        host = _view(self._buffer, self._shape, self._dtype)
        self._arriving = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        if self._device.type != "cuda":
            self._arriving.copy_(host)
            return
        side = self._store.side_stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))  # whose work may still use the memory just taken
        with torch.cuda.stream(side):
            self._arriving.copy_(host, non_blocking=True)
        self._arrived = side.record_event()


def _view(buffer: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return buffer[: shape.numel() * dtype.itemsize].view(dtype).view(shape)
