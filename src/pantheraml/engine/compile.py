"""torch.compile per decoder layer.

All layers of a model run the same code on the same shapes, so the first compilation serves them all, and a model of 80
layers compiles as fast as one of 8. Compiling the full model would take minutes and gain little between layers.

The engine's loop knows whether batches have one shape. Under a third-party trainer this shows only at run time: there,
layers are compiled once a shape has occurred several times, for at most two shapes; all other shapes run eagerly.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from pantheraml.base import log
from pantheraml.models.fast import is_fused

logger = log.get(__name__)

PASSES_BEFORE = 3
"""Training passes with a shape before layers are compiled for it, which takes seconds."""
MOST_SHAPES = 2


def compile_layers(model: nn.Module) -> int:
    """Compile every decoder layer that is not fused, in place, for static shapes; return their number."""
    layers = _layers(model)
    for layer in layers:
        layer.compile(dynamic=False)
    return len(layers)


def compile_steady_shapes(model: Any) -> int:
    """Compile the decoder layers that are not fused for recurring shapes; return their number."""
    layers = _layers(model)
    if layers:
        body = getattr(model, model.base_model_prefix, model)
        body.register_forward_pre_hook(SteadyShapes(layers), with_kwargs=True)
    return len(layers)


def _layers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and not is_fused(m)]


class SteadyShapes:
    """Pre-hook of the model body that switches its layers between compiled and eager. A copied model starts afresh."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self._layers = layers
        self._passes: Counter[tuple[int, ...]] = Counter()
        self._shapes: set[tuple[int, ...]] = set()
        self._calls = [_CompiledCall(self, layer) for layer in layers]
        self._off = False

    def __call__(self, body: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shape = self._shape(body, args, kwargs)
        compiled = shape is not None and self._is_steady(shape)
        for layer, call in zip(self._layers, self._calls, strict=True):
            if layer._compiled_call_impl in (None, call):  # else it was compiled by someone else
                layer._compiled_call_impl = call if compiled else None

    def give_up(self, err: Exception) -> None:
        """Run eagerly from now on, because the compiler failed."""
        if not self._off:
            logger.warning("decoder layers are not compiled: %s", str(err).strip().splitlines()[0])
        self._off = True

    def _shape(self, body: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...] | None:
        """Input shape of a training pass over rows of one document each; None for any other pass."""
        tokens = args[0] if args else kwargs.get("input_ids")
        checkpointed = any(layer.gradient_checkpointing for layer in self._layers)
        if tokens is None or self._off or checkpointed:  # recomputation must run like the first forward
            return None
        eligible = (
            body.training
            and torch.is_grad_enabled()
            and "max_length_q" in kwargs
            and kwargs.get("cu_seq_lens_q") is None
            and not torch.compiler.is_compiling()
            and not (dist.is_initialized() and dist.get_world_size() > 1)
        )
        return tuple(tokens.shape) if eligible else None

    def _is_steady(self, shape: tuple[int, ...]) -> bool:
        if shape in self._shapes:
            return True
        self._passes[shape] += 1
        if self._passes[shape] <= PASSES_BEFORE or len(self._shapes) == MOST_SHAPES:
            return False
        logger.info("decoder layers are compiled for batches of %s", " x ".join(map(str, shape)))
        self._shapes.add(shape)
        return True

    def __reduce__(self) -> tuple[type[SteadyShapes], tuple[list[nn.Module]]]:
        return SteadyShapes, (self._layers,)


class _CompiledCall:
    """Compiled call of a layer, with an eager fallback if the compiler fails."""

    def __init__(self, shapes: SteadyShapes, layer: Any) -> None:
        self._shapes, self._layer = shapes, layer
        self._compiled: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._compiled = self._compiled or torch.compile(self._layer._call_impl, dynamic=False)
        try:
            return self._compiled(*args, **kwargs)
        except Exception as err:
            if not type(err).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            self._shapes.give_up(err)
            return self._layer._call_impl(*args, **kwargs)
