"""Tensor-parallel mappings between replicated and sharded activations, and DTensor parameters in plain-tensor layers.

Sharded layers keep parameters as DTensors, so that names, optimizer, checkpoints and FSDP2 see full weights, but
compute with the local tensors. DTensor redistribution provides the forward and backward collectives of activations;
the only other communication is one all-reduce per step, that of `PartialGradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from pantheraml.parallel.gradient_sum import sum_gradients


def copy_to_tp(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """Identity forward, all-reduce backward."""
    return DTensor.from_local(whole, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def reduce_from_tp(share: Tensor, mesh: DeviceMesh) -> Tensor:
    """All-reduce forward, identity backward."""
    shares = DTensor.from_local(share, mesh, [Partial()], run_check=False)
    return shares.redistribute(placements=[Replicate()]).to_local()


def gather_from_tp(part: Tensor, size: int, mesh: DeviceMesh) -> Tensor:
    """All-gather along the last dimension, whose full length is `size`."""
    shape = torch.Size((*part.shape[:-1], size))
    stride = torch.empty(shape, device="meta").stride()
    parts = DTensor.from_local(part, mesh, [Shard(part.dim() - 1)], run_check=False, shape=shape, stride=stride)
    return parts.redistribute(placements=[Replicate()]).to_local()


def scatter_to_tp(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """Take this rank's shard of the last dimension forward, all-gather backward."""
    replicated = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    return replicated.redistribute(placements=[Shard(whole.dim() - 1)]).to_local()


def distribute(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """Turn a parameter that is identical on every rank into a DTensor with `placement`, without communication."""
    whole = parameter.detach()
    part = distribute_tensor(whole, mesh, [placement], src_data_rank=None).to_local()
    if (
        part.untyped_storage().nbytes() > part.nbytes
    ):  # a view would keep the full tensor alive; torch 2.13 copies by itself
        part = part.clone(memory_format=torch.contiguous_format)
    distributed = DTensor.from_local(
        part, mesh, [placement], run_check=False, shape=whole.shape, stride=tuple(whole.stride())
    )
    return nn.Parameter(distributed, requires_grad=parameter.requires_grad)


Conversion = Callable[[DTensor], Tensor]
"""Maps a DTensor parameter to the plain tensor that its layer computes with."""


def to_local(parameter: DTensor) -> Tensor:
    """Local tensor of a sharded parameter, or of a replicated one whose gradient is the same on all ranks."""
    return parameter.to_local()


def partial_grad(parameter: DTensor) -> Tensor:
    """Local tensor of a replicated parameter whose per-rank gradients are partial; see `PartialGradients`."""
    return parameter.to_local()


def first_rank_only(parameter: DTensor) -> Tensor:
    """Replicated bias before an all-reduce: the first rank adds it, the others add zero."""
    return partial_grad(parameter) * (parameter.device_mesh.get_local_rank() == 0)


class ParameterSlot(NamedTuple):
    """Where a parameter is registered, and how its layer uses it."""

    owner: nn.Module
    name: str
    conversion: Conversion


class PartialGradients:
    """Deferred all-reduce for replicated parameters whose gradients are partial on each rank.

    All parameters and micro-batches of a step are reduced together in buckets. Reduced one by one during backward, they
    would be seven small, latency-bound messages per decoder layer and micro-batch.
    """

    def __init__(self, slots: Iterable[ParameterSlot], mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._slots = [slot for slot in slots if slot.conversion in (partial_grad, first_rank_only)]

    def all_reduce(self) -> None:
        """Reduce the gradients after the last backward of a step. Collective over the mesh."""
        # look up anew: FSDP2 replaces parameters
        parameters = [slot.owner.get_parameter(slot.name) for slot in self._slots]
        sum_gradients([p for p in parameters if p.requires_grad], self._mesh.get_group())


class LocalParameters:
    """Swap DTensor parameters for the plain tensors of their conversions while `layer` runs."""

    def __init__(self, layer: nn.Module, slots: Iterable[ParameterSlot]) -> None:
        self._slots = tuple(slots)
        self._saved: list[nn.Parameter | None] = []
        layer.register_forward_pre_hook(self._swap_in)
        # always_call: also after an error, and when recomputation stops a forward early
        layer.register_forward_hook(self._restore, always_call=True)

    def _swap_in(self, _layer: nn.Module, _args: Any) -> None:
        # look up anew each time: FSDP2 replaces parameters before a layer runs
        self._saved = [slot.owner._parameters[slot.name] for slot in self._slots]
        for slot, parameter in zip(self._slots, self._saved, strict=True):
            plain: Any = slot.conversion(cast(DTensor, parameter))
            slot.owner._parameters[slot.name] = plain

    def _restore(self, _layer: nn.Module, _args: Any, _output: Any) -> None:
        for slot, parameter in zip(self._slots, self._saved, strict=False):
            slot.owner._parameters[slot.name] = parameter
        self._saved = []
