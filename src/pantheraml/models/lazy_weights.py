"""Decoder layers whose weights are read on demand, just before a layer is sharded.

Until then, expanded one-element placeholders of the right shape, dtype and device take their place and use no memory.
So a rank never holds more than its shards and one whole layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from pantheraml.base.errors import ModelError
from pantheraml.models.checkpoint_mapping import WeightUnit
from pantheraml.models.weight_reader import WeightPlacement, build_layer, open_safetensors, read_units, set_weight

DEFERRED_WEIGHTS = "deferred_weights"
"""Attribute of a module that lists its own `_DeferredUnit`s."""


@dataclass(frozen=True)
class _DeferredUnit:
    unit: WeightUnit
    place: WeightPlacement
    plain: nn.Module | None
    """The original layer, on the meta device, if a quantized layer replaced it; None: the layer is unchanged."""


def in_decoder_layers(model: Any, units: Sequence[WeightUnit]) -> list[WeightUnit]:
    """Return the units that are in decoder layers."""
    inside = {
        id(module)
        for layer in model.modules()
        if isinstance(layer, GradientCheckpointingLayer)
        for module in layer.modules()
    }
    return [unit for unit in units if id(model.get_submodule(unit.module)) in inside]


def defer_weights(model: Any, unit: WeightUnit, place: WeightPlacement) -> None:
    """Put placeholders in place of the unit's weights. They are NaN where the dtype allows, so that use is noticed."""
    plain = model.get_submodule(unit.module)
    owner = _quantized_zeros(plain, place, where=unit.module) if unit.replaced else plain
    model.set_submodule(unit.module, owner)
    for name, tensor in [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]:
        if unit.replaced or name in unit.weights():
            value = float("nan") if tensor.is_floating_point() else 0
            one = torch.full((1,), value, dtype=tensor.dtype, device=place.device)
            set_weight(owner, name, one.expand(tensor.shape))
    vars(owner).setdefault(DEFERRED_WEIGHTS, []).append(_DeferredUnit(unit, place, plain if unit.replaced else None))


def _quantized_zeros(plain: Any, place: WeightPlacement, *, where: str) -> nn.Module:
    """Return a zero layer of the type that will replace the plain one."""
    weights = {"weight": plain.weight} if plain.bias is None else {"weight": plain.weight, "bias": plain.bias}
    zeros = {name: torch.zeros(weight.shape, device=place.device) for name, weight in weights.items()}
    return build_layer(
        plain, zeros, replace(place, target=place.quant_format or "dense", checkpoint_format=None), where=where
    )


def _take_over(layer: nn.Module, other: nn.Module) -> None:
    """Move the weights and public attributes of `other`, a layer of the same type, into `layer`."""
    for name, parameter in other.named_parameters(recurse=False):
        parameter.requires_grad_(layer.get_parameter(name).requires_grad)
    layer._parameters, layer._buffers = other._parameters, other._buffers
    attributes = {name: value for name, value in vars(other).items() if not name.startswith("_") and name != "training"}
    vars(layer).update(attributes)


def materialize(root: nn.Module) -> None:
    """Read the deferred weights of `root` and its submodules, if there are any."""
    owners = [module for module in root.modules() if DEFERRED_WEIGHTS in vars(module)]
    deferred = {id(one.unit): (owner, one) for owner in owners for one in vars(owner).pop(DEFERRED_WEIGHTS)}
    if deferred:
        try:
            _read(deferred)
        except (SafetensorError, OSError) as err:
            raise ModelError(
                f"The model's weight files can no longer be read: {err}.",
                fix="Do not move or change the files during a run.",
            ) from err


def _read(deferred: dict[int, tuple[nn.Module, _DeferredUnit]]) -> None:
    units = [one for _, one in deferred.values()]
    files = {file for one in units for file, _ in one.unit.parts.values()}
    with open_safetensors(files) as opened:
        for unit, tensors in read_units([one.unit for one in units], opened, units[0].place.device):
            owner, one = deferred[id(unit)]
            if one.plain is None:
                for name, tensor in tensors.items():
                    placeholder = getattr(owner, name)
                    placeholder.data = tensor.to(placeholder.dtype)
            else:
                _take_over(owner, build_layer(one.plain, tensors, one.place, where=unit.module))


@contextlib.contextmanager
def materialize_per_layer(root: nn.Module) -> Iterator[None]:
    """While active, each deferred decoder layer has its weights during its forward only."""
    active: dict[nn.Module, contextlib.ExitStack] = {}

    def read(layer: nn.Module, _args: Any) -> None:
        active[layer] = contextlib.ExitStack()
        active[layer].enter_context(materialize_temporarily(layer))

    def release(layer: nn.Module, _args: Any, _output: Any) -> None:
        active.pop(layer, contextlib.ExitStack()).close()

    layers = [module for module in root.modules() if isinstance(module, GradientCheckpointingLayer)]
    handles = [layer.register_forward_pre_hook(read) for layer in layers]
    handles += [layer.register_forward_hook(release, always_call=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def materialize_stacked_per_layer(root: nn.Module) -> contextlib.AbstractContextManager[None]:
    """`materialize_per_layer` if there are stacked experts: grouped matmuls reject the strides of placeholders."""
    deferred = [module for module in root.modules() if DEFERRED_WEIGHTS in vars(module)]
    stacked = any(parameter.ndim > 2 for module in deferred for parameter in module.parameters(recurse=False))
    return materialize_per_layer(root) if stacked else contextlib.nullcontext()


@contextlib.contextmanager
def materialize_temporarily(root: nn.Module) -> Iterator[None]:
    """While active, `root` and its submodules have their weights; deferred ones are dropped again on exit."""
    placeholders = [_Placeholders.of(module) for module in root.modules() if DEFERRED_WEIGHTS in vars(module)]
    try:
        materialize(root)
        yield
    finally:
        for placeholder in placeholders:
            placeholder.restore()


@dataclass(frozen=True)
class _Placeholders:
    """The placeholder state of a module, to be restored after its weights were used."""

    owner: nn.Module
    deferred: list[_DeferredUnit]
    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, Tensor | None]
    values: list[tuple[Tensor, Tensor]]
    """Each tensor with its placeholder data."""

    @classmethod
    def of(cls, owner: nn.Module) -> _Placeholders:
        tensors = [*owner.parameters(recurse=False), *owner.buffers(recurse=False)]
        values = [(tensor, tensor.data) for tensor in tensors]
        return cls(owner, vars(owner)[DEFERRED_WEIGHTS], dict(owner._parameters), dict(owner._buffers), values)

    def restore(self) -> None:
        for tensor, value in self.values:
            tensor.data = value
        self.owner._parameters, self.owner._buffers = dict(self.parameters), dict(self.buffers)
        vars(self.owner)[DEFERRED_WEIGHTS] = self.deferred
