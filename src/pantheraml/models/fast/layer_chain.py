"""Consecutive fused layers, run as one chain when the first of them is called.

Between two consecutive layers there is a residual add and, in backward, its gradient is quantized to fp8. When both
layers run together, the norm that reads the sum does both (`autograd_functions.ResidualLink`). But transformers calls
one layer at a time. So the first layer runs all of them when it is called, and the others pass their input through.

This is correct only if each layer is called with the output of the one before it and the same arguments. So chaining is
used only by our own loop (`LayerChain`) and for captured CUDA graphs (`layer_cuda_graphs.LayerGraphs`), only after
passes that were observed to do so, and only if transformers' own loop calls all of the layers (`DecoderBody`). Layers
with hooks or activation checkpointing run one by one. A layer called differently than expected raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

RopeTable = tuple[Tensor, Tensor]
"""Cosine and sine of each position."""
RunLayers = Callable[[Sequence[Any], Tensor, RopeTable, dict[str, Any]], Tensor]


class DecoderBody:
    """The module whose forward calls all of `layers`, in order."""

    def __init__(self, body: Any, layers: Sequence[Any]) -> None:
        self._body, self._layers = weakref.ref(body), layers
        self.forward_started = False
        """Whether its forward has started and no layer was called since."""
        body.register_forward_pre_hook(CopySafeHook(self._mark_started))

    @classmethod
    def of(cls, model: nn.Module, layers: Sequence[Any]) -> DecoderBody | None:
        """Find the module; None if the loop over the layers is not transformers' own."""
        body: Any = next(m for m in model.modules() if any(child is layers[0] for child in getattr(m, "layers", ())))
        return cls(body, layers) if type(body).__module__.startswith("transformers.models.") else None

    def _mark_started(self, *_: object) -> None:
        self.forward_started = True

    def starts_full_pass(self) -> bool:
        """Called with the first layer: return whether a pass through all layers starts here."""
        started, self.forward_started = self.forward_started, False
        body = self._body()
        return (
            started
            and body is not None
            and body.config.num_hidden_layers == len(self._layers) == len(body.layers)
            and all(map(is_, body.layers, self._layers))
            and not torch.nn.modules.module._has_any_global_hook()
        )


class CopySafeHook:
    """A module hook that becomes a no-op when its module is copied or pickled."""

    def __init__(self, method: Callable[..., Any] | None) -> None:
        self._method = method

    def __call__(self, *args: Any) -> Any:
        return None if self._method is None else self._method(*args)

    def __deepcopy__(self, _memo: object) -> CopySafeHook:
        return CopySafeHook(None)

    def __reduce__(self) -> tuple[type[CopySafeHook], tuple[None]]:
        return CopySafeHook, (None,)


class ChainObserver:
    """Records how layers are called, one by one, during one forward."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments
        self._layers: list[Any] = []
        self._last: Tensor | None = None

    def add(self, layer: Any, given: Tensor, result: Tensor, arguments: dict[str, Any]) -> None:
        same_arguments = self._arguments.keys() == arguments.keys() and all(
            own is arguments[name] or (isinstance(own, int | bool) and own == arguments[name])
            for name, own in self._arguments.items()
        )
        if not same_arguments or (self._last is not None and given is not self._last):
            self._layers.append(None)
        self._layers.append(layer)
        self._last = result

    def saw_chain(self, layers: Sequence[Any]) -> bool:
        """Return whether each of `layers` got the output of the one before it, and the same arguments."""
        return len(self._layers) == len(layers) and all(map(is_, self._layers, layers))


class ChainOutput:
    """The output of the whole chain, on its way through the layers that the first one already ran."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self._result: Tensor | None = None
        self._version = 0
        self.left = 0
        """Number of layers still to pass it through."""

    def begin(self, result: Tensor | None) -> None:
        """Start passing `result` through the other layers; None: there is nothing to pass through."""
        self._result, self.left = None, 0
        if result is not None and len(self._layers) > 1:
            self._result, self._version, self.left = result, result._version, len(self._layers) - 1

    def passes_through(self, layer: Any, hidden: Tensor) -> bool:
        """Return whether this layer's input is the output of the whole chain already."""
        result = self._result
        if result is None:
            return False
        expected = self._layers[len(self._layers) - self.left]
        if layer is not expected or hidden is not result or hidden._version != self._version:
            self.begin(None)
            raise RuntimeError(
                "The first decoder layer ran all layers, because earlier passes called them as a chain; but now one of"
                " them was called out of order or with another input. Set train.fused=off, or load the model without"
                " FastLanguageModel."
            )
        self.left -= 1
        if not self.left:
            self._result = None
        return True


class LayerChain:
    """Runs `layers`, all of a model's decoder layers in order, when the first is called."""

    def __init__(self, layers: Sequence[Any], body: DecoderBody, run: RunLayers) -> None:
        self._layers, self._body, self._run = layers, body, run
        self._output = ChainOutput(layers)
        self._observer: ChainObserver | None = None
        self._verified: set[frozenset[str]] = set()
        """Sets of argument names for which a chain was observed."""

    def begin(self, hidden: Tensor, rope: RopeTable, arguments: dict[str, Any]) -> Tensor | None:
        """Called with the first layer: return the output of all layers, or None if each is to run by itself."""
        self._output.begin(None)
        self._observer = None
        can_chain = (
            self._body.starts_full_pass()
            and torch.is_grad_enabled()
            and "max_length_q" in arguments  # document attention: no per-layer mask, even with sliding windows
            and not any(map(_must_run_alone, self._layers))
        )
        if not can_chain:
            return None
        if frozenset(arguments) not in self._verified:
            self._observer = ChainObserver(arguments)
            return None
        result = self._run(self._layers, hidden, rope, arguments)
        self._output.begin(result)
        return result

    def is_passthrough(self, layer: Any, hidden: Tensor) -> bool:
        """Return whether this layer's input is the output of the whole chain already."""
        return self._output.passes_through(layer, hidden)

    def ran(self, layer: Any, given: Tensor, result: Tensor, arguments: dict[str, Any]) -> None:
        """Note that a layer ran by itself."""
        if self._observer is None:
            return
        self._observer.add(layer, given, result, arguments)
        if layer is self._layers[-1]:
            if self._observer.saw_chain(self._layers):
                self._verified.add(frozenset(arguments))
            self._observer = None

    def __deepcopy__(self, _memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _must_run_alone(layer: Any) -> bool:
    return is_hooked(layer) or (layer.gradient_checkpointing and layer.training)


def is_hooked(layer: Any) -> bool:
    """Return whether the layer, or one inside it, has hooks, a patched forward or exchanged parts."""
    return bool(
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        or "forward" in vars(layer)
        or layer.fused_parts.why_changed() is not None
    )
