"""Gradient, weight and update norms of sharded parameters.

`ShardedParams` computes norms of whole tensors where a rank holds only shards of them. On top of it:

- `GroupNorms`: gradient and weight norms per layer. The global norm says that something grows, these say where.
- `UpdateRatio`: norm of an optimizer update over the norm of the weights, where a too high learning rate shows first.

Both are sampled every few steps and travel with the step's other scalars, so they add no host synchronization and no
collective of their own. The update ratio is measured around the optimizer step and read with the next step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from pantheraml.parallel.json_gather import all_gather_json
from pantheraml.parallel.layout import ALONE, Layout
from pantheraml.parallel.local_shards import NamedParameters, replica_count

LAYER = re.compile(r"(?:^|\.)((?:layers|h|blocks|block)\.\d+)(?:\.|$)")
"""Layer names of the transformers model families."""

Norms = dict[str, dict[str, float]]
"""Group -> `grad_norm` and `weight_norm`."""

NOT_MEASURED = (0.0, 0.0)


@dataclass(frozen=True)
class ShardedParams:
    """Trainable parameters and this rank's shards of them, in the same order."""

    parameters: NamedParameters
    parts: NamedParameters
    layout: Layout = ALONE
    counted_elsewhere: frozenset[str] = frozenset()
    """Parameters of this rank that another pipeline stage counts."""

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.parts]

    def gradients(self) -> list[Tensor | None]:
        return [part.grad for _, part in self.parts]

    def weights(self) -> list[Tensor | None]:
        return [part.detach() for _, part in self.parts]

    def norms(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Norm of each full tensor, given this rank's shards (None counts as zeros): a float64 vector on the device.

        One all-reduce if any parameter is sharded, otherwise none. Ranks that hold the same tensor get the same bits.
        No host synchronization.
        """
        squares = self._squares(tensors)
        if self._is_sharded is not None:
            # A replicated tensor is whole on every rank, so its local square is already final.
            assert self.layout.dims.pipeline == 1, "pipeline stages are not sharded any further"
            summed = squares * self._replica_weight
            dist.all_reduce(summed)
            squares = torch.where(self._is_sharded, summed, squares)
        return squares.sqrt()

    def share(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """This rank's contribution to the squared global norm: summed over all ranks it is that square."""
        return self.shares(tensors).sum()

    def shares(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """`share` for each tensor separately."""
        return self._squares(tensors) * self._replica_weight * self._is_counted

    def _squares(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Squared norms of this rank's shards, computed in float32 or wider without copying the values."""
        squared = [torch.zeros((), dtype=torch.float64, device=self._device)] * len(self.parts)
        by_kind: dict[tuple[torch.dtype, torch.device], list[tuple[int, Tensor]]] = {}
        for index, tensor in enumerate(tensors):
            if tensor is not None and tensor.numel() > 0:
                key = torch.promote_types(tensor.dtype, torch.float32), tensor.device
                by_kind.setdefault(key, []).append((index, tensor))
        for (dtype, _), same in by_kind.items():
            norms = torch.stack(torch._foreach_norm([tensor for _, tensor in same], 2, dtype=dtype))
            squares = norms.double().square().to(self._device)
            for (index, _), square in zip(same, squares.unbind(), strict=True):
                squared[index] = square
        return torch.stack(squared) if squared else torch.zeros(0, dtype=torch.float64)

    @property
    def _device(self) -> torch.device:
        """Device of the results; a process may have its layers on several devices."""
        return self.parts[0][1].device if self.parts else torch.device("cpu")

    # The masks below stay on the device: building them on every call would be a host/device copy per step.

    @cached_property
    def _is_sharded(self) -> Tensor | None:
        """Mask of sharded parameters; None if there are none."""
        sharded = [isinstance(parameter, DTensor) for _, parameter in self.parameters]
        return torch.tensor(sharded, device=self._device) if any(sharded) else None

    @cached_property
    def _replica_weight(self) -> Tensor:
        weights = [1 / replica_count(parameter, self.layout.stage_ranks) for _, parameter in self.parameters]
        return torch.tensor(weights, dtype=torch.float64, device=self._device)

    @cached_property
    def _is_counted(self) -> Tensor:
        counted = [name not in self.counted_elsewhere for name in self.names]
        return torch.tensor(counted, dtype=torch.float64, device=self._device)


def group_of(name: str) -> str:
    """Group of a parameter: its layer, else the module it belongs to (`lm_head`, `embed_tokens`)."""
    layer = LAYER.search(name)
    if layer:
        return layer[1]
    module = re.sub(r"\.(lora_\w+|modules_to_save|default|weight|bias|base_layer|original_module)\b", "", f".{name}")
    return module.rpartition(".")[2] or name


class GroupNorms:
    """Gradient and weight norms per group, every `every` steps (0: never)."""

    def __init__(self, every: int, params: ShardedParams) -> None:
        """A collective with pipeline parallel, since stages hold different groups."""
        self._every, self._params = every, params
        self._groups = [group_of(name) for name in params.names]
        stages = [self._groups]
        if every > 0 and params.layout.dims.pipeline > 1:
            stages = all_gather_json(self._groups)
        self._names = list(dict.fromkeys(name for groups in stages for name in groups))

    def due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    def squares(self) -> Tensor:
        """This rank's shares of the squared norms on the device: one per gradient, then one per weight."""
        params = self._params
        return torch.cat([params.shares(params.gradients()), params.shares(params.weights())])

    def by_group(self, squares: Sequence[float]) -> list[float]:
        """Sum `squares` per group, in an order that is the same on all ranks."""
        half = len(self._groups)
        return [*self._summed(squares[:half]), *self._summed(squares[half:])]

    def norms(self, shares: Sequence[Sequence[float]]) -> Norms:
        """Norms from every rank's shares, one list of ranks per number of `by_group`."""
        norms = [math.sqrt(sum(ranks)) for ranks in shares]
        pairs = zip(norms[: len(self._names)], norms[len(self._names) :], strict=True)
        return {
            name: {"grad_norm": gradient, "weight_norm": weight}
            for name, (gradient, weight) in zip(self._names, pairs, strict=True)
        }

    def replicated_norms(self) -> Norms:
        """Norms where every rank holds the full model, so no communication is needed."""
        ranks = self._params.layout.dims.world_size
        return self.norms([[share] * ranks for share in self.by_group(self.squares().tolist())])

    def _summed(self, squares: Sequence[float]) -> Iterable[float]:
        sums = dict.fromkeys(self._names, 0.0)
        for name, square in zip(self._groups, squares, strict=True):
            sums[name] += square
        return sums.values()


class UpdateRatio:
    """Measures every `every`-th optimizer update (0: never)."""

    def __init__(self, every: int, params: ShardedParams) -> None:
        self._every, self._params = every, params
        self._steps = 0
        self._measured: tuple[Tensor, Tensor] | None = None

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Wrap an optimizer step."""
        self._steps += 1
        if self._every == 0 or self._steps % self._every:
            yield
            return
        parts = [part.detach() for _, part in self._params.parts]
        updates = torch._foreach_neg(parts)
        yield
        torch._foreach_add_(updates, parts)
        self._measured = (self._params.share(updates), self._params.share(parts))

    def take(self) -> tuple[float, float]:
        """This rank's shares of the squared norms of the last update and of the weights; each is returned once."""
        if self._measured is None:
            return NOT_MEASURED
        update, weights = self._measured
        self._measured = None
        return float(update), float(weights)
