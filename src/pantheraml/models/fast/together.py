"""The fused layers of a pass run in one go, by the first of them.

Between two layers that follow each other a sum is formed and, on the way back, its gradient is rounded to fp8; where
both layers are at hand, the norm that reads the sum anyway does both (`functions.Link`). But transformers calls one
layer after another. So when the first is called it runs all of them, and the others hand on what they are given.

That is right only if each layer is given what the one before it gave, and the same arguments. So it is done only after
a pass in which they were; and if somebody watches layers (hooks) or computes them again (checkpointing), they run one
by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from pantheraml.base import log

logger = log.get(__name__)

Turns = tuple[Tensor, Tensor]
"""Cosine and sine of each position."""
RunLayers = Callable[[Sequence[Any], Tensor, Turns, dict[str, Any]], Tensor]


class WatchedPass:
    """A pass in which layers run by themselves, as far as it has come."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments
        self._layers: list[Any] = []
        self._last: Tensor | None = None

    def add(self, layer: Any, given: Tensor, result: Tensor, arguments: dict[str, Any]) -> None:
        same = self._arguments.keys() == arguments.keys() and all(
            mine is arguments[name] or (isinstance(mine, int | bool) and mine == arguments[name])
            for name, mine in self._arguments.items()
        )
        if not same or (self._last is not None and given is not self._last):
            self._layers.append(None)
        self._layers.append(layer)
        self._last = result

    def went_through(self, layers: Sequence[Any]) -> bool:
        """Whether these layers were given one after another what the one before gave, and the same arguments."""
        return len(self._layers) == len(layers) and all(map(is_, self._layers, layers))


class HandedOn:
    """What the first of several layers gave for all of them, on its way through the others."""

    def __init__(self, others: int) -> None:
        self._others = others
        self._result: Tensor | None = None
        self.left = 0
        """Layers that it has still to be handed to."""

    def begin(self, result: Tensor | None) -> None:
        """None: nothing is to be handed on."""
        on_its_way = result is not None and self._others > 0
        self._result, self.left = (result, self._others) if on_its_way else (None, 0)

    def is_handed(self, hidden: Tensor) -> bool:
        """Another layer is called: whether what it is given is the result of all layers already."""
        if self._result is None or hidden is not self._result:
            return False
        self.left -= 1
        if not self.left:
            self._result = None
        return True


class LayersTogether:
    """Runs `layers`, all of a model's, in their order."""

    def __init__(self, layers: Sequence[Any], run: RunLayers) -> None:
        self._layers, self._run = list(layers), run
        self._handed_on = HandedOn(len(self._layers) - 1)
        self._watched: WatchedPass | None = None
        self._known: set[frozenset[str]] = set()
        """Names of arguments with which all layers were given the same."""
        self._off = False

    def begin(self, hidden: Tensor, turns: Turns, arguments: dict[str, Any]) -> Tensor | None:
        """The first layer is called: what all of them give, or None if each is to run by itself."""
        if self._handed_on.left:
            logger.warning("layers run one by one: %d were left out of a pass", self._handed_on.left)
            self._off = True
        self._handed_on.begin(None)
        self._watched = None
        if self._off or not torch.is_grad_enabled() or any(map(_runs_alone, self._layers)):
            return None
        if frozenset(arguments) not in self._known:
            self._watched = WatchedPass(arguments)
            return None
        result = self._run(self._layers, hidden, turns, arguments)
        self._handed_on.begin(result)
        return result

    def hands_on(self, hidden: Tensor) -> bool:
        """Another layer is called: whether what it is given is the result of all layers already."""
        return self._handed_on.is_handed(hidden)

    def ran(self, layer: Any, given: Tensor, result: Tensor, arguments: dict[str, Any]) -> None:
        """A layer ran by itself."""
        if self._watched is None:
            return
        self._watched.add(layer, given, result, arguments)
        if layer is self._layers[-1]:
            if self._watched.went_through(self._layers):
                self._known.add(frozenset(arguments))
            self._watched = None

    def __deepcopy__(self, _memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _runs_alone(layer: Any) -> bool:
    return is_watched(layer) or (layer.gradient_checkpointing and layer.training)


def is_watched(layer: Any) -> bool:
    """Whether somebody wants to see what the layer, or one in it, is given or gives, or has changed it."""
    return bool(
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        or "forward" in vars(layer)
        or layer.fused_parts.changed()
    )
