"""Between tensors that all ranks of a mesh hold alike and tensors of which each holds a part.

Sharded layers keep their parameters as DTensors, so that names, optimizer, checkpoints and FSDP2 see whole weights, but
compute with plain tensors: this rank's part of each. What DTensor decides is what crosses the border, in the forward
pass and back; besides these there is one sum at the end of a step, that of `SharedGradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from pantheraml.parallel.gradient_sum import sum_gradients


def enter(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """The same tensor, for work that is divided. Each rank's gradient is a share: they are summed (one all-reduce)."""
    return DTensor.from_local(whole, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def add_up(share: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of all ranks' tensors (one all-reduce); its gradient is everybody's."""
    shares = DTensor.from_local(share, mesh, [Partial()], run_check=False)
    return shares.redistribute(placements=[Replicate()]).to_local()


def join(part: Tensor, size: int, mesh: DeviceMesh) -> Tensor:
    """All ranks' last dimensions side by side, `size` in all (one all-gather)."""
    shape = torch.Size((*part.shape[:-1], size))
    stride = torch.empty(shape, device="meta").stride()
    parts = DTensor.from_local(part, mesh, [Shard(part.dim() - 1)], run_check=False, shape=shape, stride=stride)
    return parts.redistribute(placements=[Replicate()]).to_local()


def divide(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's part of the last dimension; the parts' gradients are put together (one all-gather)."""
    spread = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    return spread.redistribute(placements=[Shard(whole.dim() - 1)]).to_local()


def distribute(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """A parameter that every rank holds whole, as a DTensor of which each keeps its part. Nothing is sent."""
    whole = parameter.detach()
    part = distribute_tensor(whole, mesh, [placement], src_data_rank=None).to_local()
    if part.untyped_storage().nbytes() > part.nbytes:  # a view would keep the whole alive; torch 2.13 copies by itself
        part = part.clone(memory_format=torch.contiguous_format)
    spread = DTensor.from_local(
        part, mesh, [placement], run_check=False, shape=whole.shape, stride=tuple(whole.stride())
    )
    return nn.Parameter(spread, requires_grad=parameter.requires_grad)


Conversion = Callable[[DTensor], Tensor]
"""From a parameter to what a layer computes with."""


def own_part(parameter: DTensor) -> Tensor:
    """As it is here. A gradient is expected to be that of this part, or of a whole that is everywhere the same."""
    return parameter.to_local()


def shared_whole(parameter: DTensor) -> Tensor:
    """A replicated parameter in divided work: each rank finds a share of its gradient, for `SharedGradients`."""
    return parameter.to_local()


def once(parameter: DTensor) -> Tensor:
    """A replicated parameter that is added to each rank's share of a sum: the first rank's counts, others add zero."""
    return shared_whole(parameter) * (parameter.device_mesh.get_local_rank() == 0)


class Place(NamedTuple):
    """Where a parameter is, and how the layer around it uses it."""

    owner: nn.Module
    name: str
    conversion: Conversion


class SharedGradients:
    """Of those parameters at `places` that are whole on every rank but see divided work: each rank has a share.

    The shares of all parameters and all passes of a step are added up together. Sent one by one, as the gradient of
    each is found, they would be seven small messages a decoder layer and pass, and it is their number that takes time.
    """

    def __init__(self, places: Iterable[Place], mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._places = [place for place in places if place.conversion in (shared_whole, once)]

    def add_up(self) -> None:
        """After the last backward pass of a step: each gradient is the whole one. A collective."""
        # read anew: FSDP2 puts another tensor in a parameter's place
        parameters = [place.owner.get_parameter(place.name) for place in self._places]
        sum_gradients([p for p in parameters if p.requires_grad], self._mesh.get_group())


class LocalParameters:
    """While `layer` runs, the DTensors at `places` are the plain tensors that their conversions give."""

    def __init__(self, layer: nn.Module, places: Iterable[Place]) -> None:
        self._places = tuple(places)
        self._kept: list[nn.Parameter | None] = []
        layer.register_forward_pre_hook(self._take)
        # also after an error, and where recomputation stops a forward pass half way
        layer.register_forward_hook(self._put_back, always_call=True)

    def _take(self, _layer: nn.Module, _args: Any) -> None:
        # read anew each time: FSDP2 puts another tensor in a parameter's place before a layer runs
        self._kept = [place.owner._parameters[place.name] for place in self._places]
        for place, parameter in zip(self._places, self._kept, strict=True):
            plain: Any = place.conversion(cast(DTensor, parameter))
            place.owner._parameters[place.name] = plain

    def _put_back(self, _layer: nn.Module, _args: Any, _output: Any) -> None:
        for place, parameter in zip(self._places, self._kept, strict=False):
            place.owner._parameters[place.name] = parameter
        self._kept = []
