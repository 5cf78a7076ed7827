"""Data parallelism: the DDP wrapper that sums gradients over ranks, and what has to be known to set it up.

Decisions that depend on the model are pure functions which return the value and its reason, so that a run can report
them. Which rank gets which samples is in `shard_batch`; other ways than the mean are in `aggregate`.
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

from pantheraml.parallel.process_group import World

Model = TypeVar("Model", bound=nn.Module)


class DDPSettings(Protocol):
    """DDP's own options, by DDP's own names."""

    @property
    def find_unused_parameters(self) -> bool: ...
    @property
    def gradient_as_bucket_view(self) -> bool: ...
    @property
    def broadcast_buffers(self) -> bool: ...
    @property
    def bucket_cap_mb(self) -> float: ...


class Decision(NamedTuple):
    value: bool
    reason: str


def leave_out(model: nn.Module, buffers: Sequence[str]) -> None:
    """DDP, ours or another trainer's, does not send these."""
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
    """`model` under DDP over `group` (None = all ranks), or as it is where that is one process.

    `constant_buffers` are names of buffers that no step changes and all ranks hold alike, such as packed weights: DDP
    would send them before every forward pass. `static_graph` is for `decide_static_graph` to say.
    """
    if world.size == 1 or dist.get_world_size(group) == 1:
        return model
    leave_out(model, constant_buffers)
    # torch 2.13 deprecates the name broadcast_buffers; it is passed only by those who turn it off
    buffers: dict[str, Any] = {} if settings.broadcast_buffers else {"broadcast_buffers": False}
    return DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        process_group=group,
        find_unused_parameters=settings.find_unused_parameters,
        gradient_as_bucket_view=settings.gradient_as_bucket_view,
        bucket_cap_mb=settings.bucket_cap_mb,
        static_graph=static_graph,
        **buffers,
    )


def without_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Backward passes inside keep their gradients local: for all micro-batches of a step but the last."""
    if isinstance(model, DistributedDataParallel):
        return model.no_sync()
    return nullcontext()


def sends_buffers(model: nn.Module) -> bool:
    """Whether DDP sends buffers to all ranks before a forward pass, even one whose gradients stay local."""
    return isinstance(model, DistributedDataParallel) and bool(model.modules_buffers)


def decide_static_graph(
    *,
    allowed: bool,
    reentrant_checkpointing: bool,
    unused_parameters: bool,
    compiled: bool,
    mixture_of_experts: bool,
    accumulates: bool = True,
) -> Decision:
    """Whether DDP may take every step to use the same parameters equally often.

    Reentrant checkpointing may need that: where a layer is checkpointed more than once, its nested backward passes make
    parameters ready more than once, which DDP otherwise refuses ("marked ready only once"). `accumulates` is False for
    those who know that every step of every rank has just one backward pass.
    """
    if not allowed:
        return Decision(False, "parallel.static_graph is off, or UNSLOTH_DISABLE_DDP_STATIC_GRAPH is set")
    if compiled:
        return Decision(False, "compiled layers and a static graph do not go together")
    if mixture_of_experts:
        return Decision(False, "which experts are used changes from step to step")
    if unused_parameters:
        return Decision(False, "parallel.find_unused_parameters says that steps differ in what they use")
    if not reentrant_checkpointing:
        return Decision(False, "nothing needs it: there is no reentrant checkpointing")
    if accumulates:
        # torch 2.13 ends in an internal assertion (reducer.cpp, expect_autograd_hooks_) at the first such pass
        return Decision(False, "torch's static graph cannot begin with a backward pass that keeps its gradients local")
    return Decision(True, "reentrant checkpointing may make parameters ready more than once")


def uses_reentrant_checkpointing(model: nn.Module) -> bool:
    """Whether transformers was told to checkpoint `model` by torch's reentrant kind, torch's choice if nobody says."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            function = module._gradient_checkpointing_func
            if isinstance(function, partial):
                told = function.keywords.get("use_reentrant")
                if told is True or (told is None and function.func is checkpoint):
                    return True
    return False


def has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def synchronise_batch_norm(
    model: Model, device: torch.device, group: dist.ProcessGroup | None = None
) -> tuple[Model, Decision]:
    """`model` with batch norm over the samples of all ranks of `group`, if it has such layers and torch can do it."""
    if not has_batch_norm(model):
        return model, Decision(False, "the model has no batch norm layers")
    if device.type != "cuda":
        return model, Decision(False, "torch synchronises batch norm between GPUs only")
    assert not isinstance(model, _BatchNorm), "a model is more than one layer, so its layers are converted in place"
    nn.SyncBatchNorm.convert_sync_batchnorm(model, group)
    return model, Decision(True, "the model has batch norm layers")


class OwnTime:
    """How long a rank's own forward and backward passes take in a step, without waiting for the others.

    A whole step takes all ranks equally long, for the fast ones wait for the slow ones inside the last backward pass.
    The gradient of the first trainable parameter is among the last to be computed, and is there before that wait.
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
        """Since `start`; 0 if nothing was computed since. On a GPU the host waits for the backward pass."""
        if not self._on_gpu:
            return self._times[1] - self._times[0]
        begin, end = self._events
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    def close(self) -> None:
        self._handle.remove()

    def _mark_end(self, _: Tensor) -> None:
        if self._on_gpu:
            self._events[1].record()
        else:
            self._times[1] = time.perf_counter()
