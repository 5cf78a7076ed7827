"""Local shards of parameters, for elementwise optimizers.

A sharded parameter is a DTensor. An elementwise optimizer needs only its local tensor, and on plain tensors it is the
same code in every parallel mode. An unsharded parameter is its own shard.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

NamedParameters = Sequence[tuple[str, nn.Parameter]]


def local_shards(parameters: NamedParameters) -> list[tuple[str, nn.Parameter]]:
    """Return this rank's shard of each parameter, sharing memory; uneven sharding may leave it empty."""
    return [(name, _local_part(parameter)) for name, parameter in parameters]


def move_gradients_to_shards(parameters: NamedParameters, parts: NamedParameters) -> None:
    """Move the gradients of sharded parameters to their local shards `parts`, where the optimizer clears them.

    A collective if a gradient is still Partial (tensor parallelism leaves such).
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


def replica_count(parameter: Tensor, ranks: int) -> int:
    """Return how many of the `ranks` ranks that hold `parameter` or a shard of it hold this rank's values."""
    if not isinstance(parameter, DTensor):
        return ranks
    mesh = parameter.device_mesh
    shards = math.prod(mesh.size(d) for d, placement in enumerate(parameter.placements) if not placement.is_replicate())
    return ranks // shards


def local_squared_norm(parameters: NamedParameters, parts: NamedParameters, *, ranks: int) -> Tensor:
    """Return this rank's contribution, a float64 scalar, to the squared global gradient norm.

    The sum over all ranks is the squared norm, however parameters are sharded: replicated values are divided by their
    number of replicas. `ranks` is the number of ranks in this pipeline stage. Gradients are read from `parts`. No
    host-device sync.
    """
    by_replicas: defaultdict[int, list[Tensor]] = defaultdict(list)
    for (_, parameter), (_, part) in zip(parameters, parts, strict=True):
        if part.grad is not None and part.grad.numel() > 0:
            by_replicas[replica_count(parameter, ranks)].append(part.grad)
    found = [
        square / count if count > 1 else square for count, same in by_replicas.items() for square in _squares(same)
    ]
    if not found:
        return torch.zeros((), dtype=torch.float64, device=parts[0][1].device if parts else "cpu")
    device = parts[0][1].device
    return found[0].to(device) if len(found) == 1 else torch.stack([square.to(device) for square in found]).sum()


def _local_part(parameter: nn.Parameter) -> nn.Parameter:
    if not isinstance(parameter, DTensor):
        return parameter
    return nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)


def _squares(gradients: list[Tensor]) -> list[Tensor]:
    """Return squared norms in float64, one per dtype and device.

    Norms accumulate in float32, or wider if gradients are, without upcast copies.
    """
    alike: defaultdict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        alike[torch.promote_types(gradient.dtype, torch.float32), gradient.device].append(gradient)
    norms = (torch.stack(torch._foreach_norm(same, 2, dtype=dtype)) for (dtype, _), same in alike.items())
    return [torch.linalg.vector_norm(norm, dtype=torch.float64).square() for norm in norms]
