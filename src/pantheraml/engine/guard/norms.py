"""Norms of tensors that belong to parameters (gradients, weights), where a process may hold parts of them only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from pantheraml.parallel.layout import ALONE, Layout
from pantheraml.parallel.local import NamedParameters, copies


@dataclass(frozen=True)
class Spread:
    """The parameters that train and what this process holds of them, in one order."""

    parameters: NamedParameters
    parts: NamedParameters
    layout: Layout = ALONE
    held_twice: frozenset[str] = frozenset()
    """Parameters of this process that another pipeline stage counts."""

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.parts]

    def gradients(self) -> list[Tensor | None]:
        return [part.grad for _, part in self.parts]

    def weights(self) -> list[Tensor | None]:
        return [part.detach() for _, part in self.parts]

    def norms(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Of each whole tensor that `tensors` are the parts of (None counts as zeros): a float64 vector on the device.

        One all-reduce if some are cut, none otherwise; processes that hold the same tensor get the same bits. The host
        does not wait for the device.
        """
        squares = self._squares(tensors)
        if self._is_cut is not None:
            # A tensor that is not cut is whole on every rank, and its squares stay what was found here.
            assert self.layout.dims.pipeline == 1, "stages of a pipeline are not cut any further"
            summed = squares * self._one_of_copies
            dist.all_reduce(summed)
            squares = torch.where(self._is_cut, summed, squares)
        return squares.sqrt()

    def share(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """This rank's share of the squared norm of all tensors as one: the sum over all ranks is that square."""
        return self.shares(tensors).sum()

    def shares(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """The same for each tensor by itself."""
        return self._squares(tensors) * self._one_of_copies * self._is_counted

    def _squares(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Of this rank's parts. Norms are taken in float32 unless values are wider: no copies are made of them."""
        found = [torch.zeros((), dtype=torch.float64, device=self._device)] * len(self.parts)
        alike: dict[tuple[torch.dtype, torch.device], list[tuple[int, Tensor]]] = {}
        for index, tensor in enumerate(tensors):
            if tensor is not None and tensor.numel() > 0:
                key = torch.promote_types(tensor.dtype, torch.float32), tensor.device
                alike.setdefault(key, []).append((index, tensor))
        for (dtype, _), same in alike.items():
            norms = torch.stack(torch._foreach_norm([tensor for _, tensor in same], 2, dtype=dtype))
            squares = norms.double().square().to(self._device)
            for (index, _), square in zip(same, squares.unbind(), strict=True):
                found[index] = square
        return torch.stack(found) if found else torch.zeros(0, dtype=torch.float64)

    # Kept on the device, where making them each time would have the host wait.

    @property
    def _device(self) -> torch.device:
        """Where norms come together; a process may have its layers on several."""
        return self.parts[0][1].device if self.parts else torch.device("cpu")

    @cached_property
    def _is_cut(self) -> Tensor | None:
        """Which parameters are cut; None if none is."""
        cut = [isinstance(parameter, DTensor) for _, parameter in self.parameters]
        return torch.tensor(cut, device=self._device) if any(cut) else None

    @cached_property
    def _one_of_copies(self) -> Tensor:
        shares = [1 / copies(parameter, self.layout.stage_ranks) for _, parameter in self.parameters]
        return torch.tensor(shares, dtype=torch.float64, device=self._device)

    @cached_property
    def _is_counted(self) -> Tensor:
        counted = [name not in self.held_twice for name in self.names]
        return torch.tensor(counted, dtype=torch.float64, device=self._device)
