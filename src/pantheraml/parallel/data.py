"""Data parallelism: the DDP wrapper and the decisions needed to set it up.

Model-dependent decisions are pure functions that return a value and its reason, so that a run can report them.
`shard_batch` assigns samples to ranks; `aggregate` has the gradient aggregations other than the mean.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pantheraml.parallel.device_map import is_split
from pantheraml.parallel.process_group import World

Model = TypeVar("Model", bound=nn.Module)


class DDPSettings(Protocol):
    """DDP options under their DDP names."""

    @property
    def find_unused_parameters(self) -> bool: ...
    @property
    def gradient_as_bucket_view(self) -> bool: ...
    @property
    def broadcast_buffers(self) -> bool: ...
    @property
    def bucket_cap_mb(self) -> float: ...


class DdpChoice(NamedTuple):
    value: bool
    reason: str


def ignore_in_ddp(model: nn.Module, buffers: Sequence[str]) -> None:
    """Exclude these buffers from DDP's broadcasts, including DDP wrappers of other trainers."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(buffers))


def wrap(
    model: nn.Module,
    world: World,
    settings: DDPSettings,
    *,
    constant_buffers: Sequence[str] = (),
    group: dist.ProcessGroup | None = None,
    static_graph: bool = False,
) -> nn.Module:
    """Wrap `model` in DDP over `group` (None = all ranks); return it unchanged in a group of one.

    `constant_buffers` names buffers that never change and are identical on all ranks, such as quantized weights; DDP
    would broadcast them before every forward. `static_graph` comes from `decide_static_graph`.
    """
    if world.size == 1 or dist.get_world_size(group) == 1:
        return model
    ignore_in_ddp(model, constant_buffers)
    # torch 2.13 deprecates the argument broadcast_buffers, so it is passed only to turn it off
    buffers: dict[str, Any] = {} if settings.broadcast_buffers else {"broadcast_buffers": False}
    return DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" and not is_split(model) else None,
        process_group=group,
        find_unused_parameters=settings.find_unused_parameters,
        gradient_as_bucket_view=settings.gradient_as_bucket_view,
        bucket_cap_mb=settings.bucket_cap_mb,
        static_graph=static_graph,
        **buffers,
    )


def without_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Skip gradient synchronization inside: for all micro-batches of a step but the last."""
    if isinstance(model, DistributedDataParallel):
        return model.no_sync()
    return nullcontext()


def sends_buffers(model: nn.Module) -> bool:
    """Return True if DDP broadcasts buffers before each forward, which it does even under `no_sync`."""
    return isinstance(model, DistributedDataParallel) and bool(model.modules_buffers)


def decide_static_graph(
    *,
    allowed: bool,
    reentrant_checkpointing: bool,
    unused_parameters: bool,
    compiled: bool,
    mixture_of_experts: bool,
    accumulates: bool = True,
) -> DdpChoice:
    """Decide whether DDP may assume a static graph.

    Reentrant checkpointing may need it: if a layer is checkpointed more than once, nested backward passes make its
    parameters ready more than once, which DDP otherwise rejects ("marked ready only once"). Pass `accumulates=False`
    only if every step has exactly one backward on every rank.
    """
    if not allowed:
        return DdpChoice(False, "parallel.static_graph is off, or UNSLOTH_DISABLE_DDP_STATIC_GRAPH is set")
    if compiled:
        return DdpChoice(False, "compiled layers are incompatible with a static graph")
    if mixture_of_experts:
        return DdpChoice(False, "the experts in use change from step to step")
    if unused_parameters:
        return DdpChoice(False, "parallel.find_unused_parameters is on, so steps may use different parameters")
    if not reentrant_checkpointing:
        return DdpChoice(False, "not needed without reentrant checkpointing")
    if accumulates:
        # torch 2.13 fails an internal assertion (reducer.cpp, expect_autograd_hooks_) on the first no_sync backward
        return DdpChoice(False, "torch's static graph cannot start with a backward under no_sync")
    return DdpChoice(True, "reentrant checkpointing may make parameters ready more than once")


def uses_reentrant_checkpointing(model: nn.Module) -> bool:
    """Return True if transformers checkpoints `model` with torch's reentrant variant, which is torch's default."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            function = module._gradient_checkpointing_func
            if isinstance(function, partial):
                use_reentrant = function.keywords.get("use_reentrant")
                if use_reentrant is True or (use_reentrant is None and function.func is checkpoint):
                    return True
    return False


def has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def sync_batch_norm(
    model: Model, device: torch.device, group: dist.ProcessGroup | None = None
) -> tuple[Model, DdpChoice]:
    """Convert batch norm layers to SyncBatchNorm over `group`, if there are any and torch supports it."""
    if not has_batch_norm(model):
        return model, DdpChoice(False, "the model has no batch norm layers")
    if device.type != "cuda":
        return model, DdpChoice(False, "torch supports SyncBatchNorm on GPUs only")
    assert not isinstance(model, _BatchNorm), "submodules are converted in place, a bare batch norm would not be"
    nn.SyncBatchNorm.convert_sync_batchnorm(model, group)
    return model, DdpChoice(True, "the model has batch norm layers")


class ComputeTimer:
    """Per-rank forward and backward time of a step, without the wait for other ranks.

    Step time is the same on all ranks, because fast ranks wait for slow ones in the all-reduce of the last backward.
    The gradient of the first trainable parameter is among the last to be computed and is ready before that wait.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self._on_gpu else []
        self._times = [0.0, 0.0]
        first = next(parameter for _, parameter in parameters if parameter.requires_grad)
        self._handle = first.register_post_accumulate_grad_hook(self._mark_end)

    def start(self) -> None:
        if self._on_gpu:
            for event in self._events:
                event.record()
        else:
            self._times = [time.perf_counter()] * 2

    def seconds(self) -> float:
        """Return seconds since `start`, or 0 if nothing was computed. On a GPU this waits for the backward."""
        if not self._on_gpu:
            return self._times[1] - self._times[0]
        begin, end = self._events
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def close(self) -> None:
        self._handle.remove()

    def _mark_end(self, _: Tensor) -> None:
        if self._on_gpu:
            self._events[1].record()
        else:
            self._times[1] = time.perf_counter()
