"""The part of each parameter that lies on this rank, for an optimizer that treats every value by itself.

A sharded parameter is a DTensor; an elementwise optimizer needs no more than its local tensor, and running on plain
tensors it is the same code in every mode. A parameter that is not sharded is its own part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

NamedParameters = Sequence[tuple[str, nn.Parameter]]


def local_parts(parameters: NamedParameters) -> list[tuple[str, nn.Parameter]]:
    """What this rank holds of each parameter, in the same memory; with uneven shards it may be empty."""
    return [(name, _local_part(parameter)) for name, parameter in parameters]


def hand_over_gradients(parameters: NamedParameters, parts: NamedParameters) -> None:
    """Move the gradients of sharded parameters to their `parts`, from where the optimizer clears them.

    A collective where ranks still hold addends of a gradient (tensor parallelism leaves such).
    """
    for (_, parameter), (_, part) in zip(parameters, parts, strict=True):
        gradient = parameter.grad
        if parameter is part or gradient is None:
            continue
        assert isinstance(parameter, DTensor)
        assert isinstance(gradient, DTensor)
        if gradient.placements != parameter.placements:
            gradient = gradient.redistribute(placements=parameter.placements)
        part.grad = gradient.to_local()
        parameter.grad = None


def copies(parameter: Tensor, ranks: int) -> int:
    """How many ranks hold the same values of `parameter` as this one, among `ranks` that have it in whole or part."""
    if not isinstance(parameter, DTensor):
        return ranks
    mesh = parameter.device_mesh
    shards = math.prod(mesh.size(d) for d, placement in enumerate(parameter.placements) if not placement.is_replicate())
    return ranks // shards


def local_squares(parameters: NamedParameters, parts: NamedParameters, *, ranks: int) -> Tensor:
    """This rank's share, a float64 scalar, of the squared norm of all gradients: the sum over all ranks is that norm's
    square, however the parameters are spread. `ranks`: how many there are in this pipeline stage.

    The gradients are those that `parts` hold. The host does not wait for the device.
    """
    by_copies: defaultdict[int, list[Tensor]] = defaultdict(list)
    for (_, parameter), (_, part) in zip(parameters, parts, strict=True):
        if part.grad is not None and part.grad.numel() > 0:
            by_copies[copies(parameter, ranks)].append(part.grad)
    found = [square / count if count > 1 else square for count, same in by_copies.items() for square in _squares(same)]
    if not found:
        return torch.zeros((), dtype=torch.float64, device=parts[0][1].device if parts else "cpu")
    device = parts[0][1].device
    return found[0].to(device) if len(found) == 1 else torch.stack([square.to(device) for square in found]).sum()


def _local_part(parameter: nn.Parameter) -> nn.Parameter:
    if not isinstance(parameter, DTensor):
        return parameter
    return nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)


def _squares(gradients: list[Tensor]) -> list[Tensor]:
    """In float64, one for all of a dtype and device. Norms are taken in float32 unless gradients are wider: no copies
    are made of them."""
    alike: defaultdict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        alike[torch.promote_types(gradient.dtype, torch.float32), gradient.device].append(gradient)
    norms = (torch.stack(torch._foreach_norm(same, 2, dtype=dtype)) for (dtype, _), same in alike.items())
    return [torch.linalg.vector_norm(norm, dtype=torch.float64).square() for norm in norms]
