"""Norms of gradients and weights by group: one for each layer of the model, one for each other part of it.

A step's global norm tells that something grows; these tell where. They are taken now and then, and go the way of the
step's other numbers: with them to the host, and with them to the other ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pantheraml.engine.guard.norms import Spread
from pantheraml.parallel.exchange import all_gather_json

LAYER = re.compile(r"(?:^|\.)((?:layers|h|blocks|block)\.\d+)(?:\.|$)")
"""As the families of transformers name their layers."""

Norms = dict[str, dict[str, float]]
"""Group -> `grad_norm` and `weight_norm`."""


def group_of(name: str) -> str:
    """The group of a parameter: its layer, else the module it belongs to (`lm_head`, `embed_tokens`)."""
    found = LAYER.search(name)
    if found:
        return found[1]
    module = re.sub(r"\.(lora_\w+|modules_to_save|default|weight|bias|base_layer|original_module)\b", "", f".{name}")
    return module.rpartition(".")[2] or name


class GroupNorms:
    def __init__(self, every: int, spread: Spread) -> None:
        """Of each `every`-th step; 0 = none. A collective where stages of a pipeline hold different groups."""
        self._every, self._spread = every, spread
        self._groups = [group_of(name) for name in spread.names]
        stages = [self._groups]
        if every > 0 and spread.layout.dims.pipeline > 1:
            stages = all_gather_json(self._groups)
        self._names = list(dict.fromkeys(name for groups in stages for name in groups))

    def due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    def squares(self) -> Tensor:
        """This rank's shares of squared norms, of each gradient and then of each weight, on the device."""
        spread = self._spread
        return torch.cat([spread.shares(spread.gradients()), spread.shares(spread.weights())])

    def by_group(self, squares: Sequence[float]) -> list[float]:
        """The same by group, in an order that all ranks share."""
        half = len(self._groups)
        return [*self._summed(squares[:half]), *self._summed(squares[half:])]

    def norms(self, shares: Sequence[Sequence[float]]) -> Norms:
        """From every rank's, for each number that `by_group` gives."""
        found = [math.sqrt(sum(of_ranks)) for of_ranks in shares]
        pairs = zip(found[: len(self._names)], found[len(self._names) :], strict=True)
        return {
            name: {"grad_norm": gradient, "weight_norm": weight}
            for name, (gradient, weight) in zip(self._names, pairs, strict=True)
        }

    def of_copies(self) -> Norms:
        """Where every rank holds the whole model, and so knows what the others would say."""
        ranks = self._spread.layout.dims.world_size
        return self.norms([[share] * ranks for share in self.by_group(self.squares().tolist())])

    def _summed(self, squares: Sequence[float]) -> Iterable[float]:
        sums = dict.fromkeys(self._names, 0.0)
        for name, square in zip(self._groups, squares, strict=True):
            sums[name] += square
        return sums.values()
