"""Norms of gradients and weights by group: one for each layer of the model, one for each other part of it.

A step's global norm tells that something grows; these tell where. They are taken now and then, for the host waits for
them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from pantheraml.engine.guard.norms import Spread

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
        """Of each `every`-th step; 0 = none."""
        self._every, self._spread = every, spread
        self._groups = [group_of(name) for name in spread.names]

    def at(self, step: int) -> Norms | None:
        """Before the step is taken; None if it is not one of those. A collective, which all ranks come to alike."""
        if self._every == 0 or step % self._every:
            return None
        spread = self._spread
        gradients, weights = self._by_group(spread.gradients()), self._by_group(spread.weights())
        own = {name: {"grad_norm": gradients[name], "weight_norm": weights[name]} for name in gradients}
        if spread.layout.dims.pipeline == 1:
            return own
        everyone: list[Norms] = [{} for _ in range(spread.layout.dims.world_size)]
        dist.all_gather_object(everyone, own)
        return {name: norms for stage in everyone for name, norms in stage.items()}

    def _by_group(self, tensors: Sequence[Tensor | None]) -> dict[str, float]:
        squares: dict[str, float] = dict.fromkeys(self._groups, 0.0)
        for name, norm in zip(self._groups, self._spread.norms(tensors).tolist(), strict=True):
            squares[name] += norm**2
        return {name: math.sqrt(square) for name, square in squares.items()}
