"""Batch size by probing: real forward and backward passes of the user's model, on inputs that it was called with.

A probe measures bytes and seconds per sample at `base`, `base / 2` and `base / 4`; the answer is the fastest size that
fits into the memory that is free now. Nothing of the training changes: RNG, buffers and gradients are as before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from pantheraml.base import log
from pantheraml.engine.memory.usage import free_bytes

logger = log.get_manager()

SAFE_SHARE = 0.8
"""Of the free memory; the rest is for fragmentation, and for temporary tensors that a probe does not see."""
SIZES = 3
REPEATS = 2
SECONDS = 0.05
"""Passes are repeated for this long: the fastest of many short ones is hardly disturbed by other processes."""
CLEARLY_FASTER = 1.1
"""A smaller batch must be this much faster per sample to be preferred."""


@dataclass(frozen=True)
class Measured:
    size: int
    bytes_used: int
    """Memory of the activations that the backward pass needs; on a GPU, of the whole pass at its peak."""
    seconds: float


@dataclass(frozen=True)
class ForwardInputs:
    """Arguments of a training forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def rows(self) -> int | None:
        """Number of samples; None if tensors disagree or there are none."""
        found = {leaf.shape[0] for leaf in self._tensors() if leaf.dim() > 0}
        return found.pop() if len(found) == 1 else None

    def of_size(self, size: int) -> ForwardInputs:
        """Return inputs of `size` samples, repeated if there are fewer."""

        def pick(value: Tensor) -> Tensor:
            if value.dim() == 0:
                return value
            return value.detach()[torch.arange(size, device=value.device) % value.shape[0]]

        args, kwargs = tree_map_only(Tensor, pick, (self.args, self.kwargs))
        return ForwardInputs(args, kwargs)

    def _tensors(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]


def probe_sizes(model: nn.Module, inputs: ForwardInputs, base: int) -> list[Measured]:
    """Measure forward and backward of `model` at `base` samples and fewer; sizes that do not fit are left out."""
    sizes = sorted({max(1, base >> halvings) for halvings in range(SIZES)}, reverse=True)
    found = []
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with _undisturbed(model, device):
        for size in sizes:
            try:
                found.append(_measure(model, inputs.of_size(size), size, device))
            except torch.OutOfMemoryError:
                logger.info("a batch of %d samples does not fit on %s", size, device)
    return found


def choose_size(measured: list[Measured], base: int, free: int) -> tuple[int, str]:
    """Return the samples per replica, at least 1 and at most `base`, and the reason. `measured`: largest size first."""
    if not measured:
        return 1, "no size that was tried fits"
    per_sample = max(one.bytes_used / one.size for one in measured)
    room = max(1, int(free * SAFE_SHARE / max(per_sample, 1.0)))
    fitting = [one for one in measured if one.size <= room]
    if not fitting:
        return room, f"{free:,} bytes are free, and a sample takes {per_sample:,.0f}"
    best = fitting[0]
    for one in fitting[1:]:
        if best.seconds / best.size > CLEARLY_FASTER * one.seconds / one.size:
            best = one
    if best.size < base:
        slower = "faster per sample" if fitting[0].size == base else "the largest that fits"
        return best.size, f"{slower}: {best.size / best.seconds:,.0f} samples/s, {per_sample:,.0f} bytes per sample"
    return best.size, f"{base} fit, at {best.size / best.seconds:,.0f} samples/s"


def free_on(model: nn.Module) -> int:
    """Return the free memory of the fullest device of `model`."""
    devices = {parameter.device for parameter in model.parameters()} or {torch.device("cpu")}
    return min(map(free_bytes, devices))


def _measure(model: nn.Module, inputs: ForwardInputs, size: int, device: torch.device) -> Measured:
    used, seconds = 0, float("inf")
    passes, end = 0, time.perf_counter() + SECONDS
    while passes < 1 + REPEATS or time.perf_counter() < end:  # the first may compile or choose kernels
        passes += 1
        with _counting(model, device) as counted:
            began = time.perf_counter()
            _pass(model, inputs)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds = min(seconds, time.perf_counter() - began)
        used = max(used, counted[0])
    return Measured(size, used, seconds)


def _pass(model: nn.Module, inputs: ForwardInputs) -> None:
    output = model(*inputs.args, **inputs.kwargs)
    losses = [leaf.float().sum() for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # not backward(): that would add to .grad, and start the all-reduces of a DDP wrapper
    torch.autograd.grad(torch.stack([loss.to(losses[0].device) for loss in losses]).sum(), trained, allow_unused=True)


@contextmanager
def _counting(model: nn.Module, device: torch.device) -> Iterator[list[int]]:
    """Yield a list of one number: the bytes that the passes inside need, once they are over."""
    found = [0]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield found
        found[0] = torch.cuda.max_memory_allocated(device) - before
        return
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        yield found
    found[0] = sum(saved.values())


@contextmanager
def _undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the RNG states and buffers, which batch norm and dropout change."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
