"""Fused layers that run in one go: by the first of them, while the others hand on what they are given.

Between two layers that follow each other a sum is formed and, on the way back, its gradient is rounded to fp8; where
both layers are at hand, the norm that reads the sum anyway does both (`functions.Link`). But transformers calls one
layer after another. So when the first is called it runs all of them.

That is right only if each layer is given what the one before it gave, and the same arguments. So it is for our own loop
(`LayersTogether`), for what was recorded (`recorded.LayerGraphs`), and only after passes in which it was so; the loop
over the layers is transformers', over all of them (`Body`); and if somebody watches layers (hooks) or computes them
again (checkpointing), they run one by one. A layer that is then called in another way than was expected raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

Turns = tuple[Tensor, Tensor]
"""Cosine and sine of each position."""
RunLayers = Callable[[Sequence[Any], Tensor, Turns, dict[str, Any]], Tensor]


class Body:
    """The module whose forward pass calls all of `layers`, in their order."""

    def __init__(self, body: Any, layers: Sequence[Any]) -> None:
        self._body, self._layers = weakref.ref(body), layers
        self.has_begun = False
        """Its forward pass, and no layer was called since."""
        body.register_forward_pre_hook(Hook(self._begins))

    @classmethod
    def of(cls, model: nn.Module, layers: Sequence[Any]) -> Body | None:
        """None: the loop over the layers is not transformers'."""
        body: Any = next(m for m in model.modules() if any(child is layers[0] for child in getattr(m, "layers", ())))
        return cls(body, layers) if type(body).__module__.startswith("transformers.models.") else None

    def module(self) -> Any:
        return self._body()

    def _begins(self, *_: object) -> None:
        self.has_begun = True

    def calls_all(self) -> bool:
        """The first layer is called: whether that is the beginning of a pass through all of them."""
        begun, self.has_begun = self.has_begun, False
        body = self._body()
        return (
            begun
            and body is not None
            and body.config.num_hidden_layers == len(self._layers) == len(body.layers)
            and all(map(is_, body.layers, self._layers))
            and not torch.nn.modules.module._has_any_global_hook()
        )


class Hook:
    """What a module calls. That of a copy does nothing."""

    def __init__(self, method: Callable[..., Any] | None) -> None:
        self._method = method

    def __call__(self, *args: Any) -> Any:
        return None if self._method is None else self._method(*args)

    def __deepcopy__(self, _memo: object) -> Hook:
        return Hook(None)

    def __reduce__(self) -> tuple[type[Hook], tuple[None]]:
        return Hook, (None,)


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

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self._result: Tensor | None = None
        self._version = 0
        self.left = 0
        """Layers that it has still to be handed to."""

    def begin(self, result: Tensor | None) -> None:
        """None: nothing is to be handed on."""
        self._result, self.left = None, 0
        if result is not None and len(self._layers) > 1:
            self._result, self._version, self.left = result, result._version, len(self._layers) - 1

    def is_handed(self, layer: Any, hidden: Tensor) -> bool:
        """Another layer is called: whether what it is given is the result of all layers already."""
        result = self._result
        if result is None:
            return False
        expected = self._layers[len(self._layers) - self.left]
        if layer is not expected or hidden is not result or hidden._version != self._version:
            self.begin(None)
            raise RuntimeError(
                "All decoder layers were run by the first of them, as they were called one after another before; but"
                " now one of them was called out of turn, or with something else. Set train.fused=off, or load the"
                " model without FastLanguageModel."
            )
        self.left -= 1
        if not self.left:
            self._result = None
        return True


class LayersTogether:
    """Runs `layers`, all of a model's, in their order."""

    def __init__(self, layers: Sequence[Any], body: Body, run: RunLayers) -> None:
        self._layers, self._body, self._run = layers, body, run
        self._handed_on = HandedOn(layers)
        self._watched: WatchedPass | None = None
        self._known: set[frozenset[str]] = set()
        """Names of arguments with which all layers were given the same."""

    def begin(self, hidden: Tensor, turns: Turns, arguments: dict[str, Any]) -> Tensor | None:
        """The first layer is called: what all of them give, or None if each is to run by itself."""
        self._handed_on.begin(None)
        self._watched = None
        usual = (
            self._body.calls_all()
            and torch.is_grad_enabled()
            and "max_length_q" in arguments  # document attention: a layer has no mask of its own, whatever its window
            and not any(map(_runs_alone, self._layers))
        )
        if not usual:
            return None
        if frozenset(arguments) not in self._known:
            self._watched = WatchedPass(arguments)
            return None
        result = self._run(self._layers, hidden, turns, arguments)
        self._handed_on.begin(result)
        return result

    def hands_on(self, layer: Any, hidden: Tensor) -> bool:
        """Another layer is called: whether what it is given is the result of all layers already."""
        return self._handed_on.is_handed(layer, hidden)

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
