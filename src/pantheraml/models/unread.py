"""Decoder layers whose weights are read when somebody asks for them, which is when a layer is about to be cut.

Until then stand-ins of the right shape, dtype and device are in their places, which take no memory. So a rank never
holds more of the layers than its part and one that is whole.
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
from pantheraml.models.matching import Unit
from pantheraml.models.units import Placement, make_layer, opened_files, put, read_units

UNREAD = "unread_weights"
"""The attribute of a module with `_Unread` of its own weights."""


@dataclass(frozen=True)
class _Unread:
    unit: Unit
    place: Placement
    plain: nn.Module | None
    """What the layer was, without memory, before one that is packed took its place; None: it is still that one."""


def in_decoder_layers(model: Any, units: Sequence[Unit]) -> list[Unit]:
    """Those of the units that are in decoder layers."""
    inside = {
        id(module)
        for layer in model.modules()
        if isinstance(layer, GradientCheckpointingLayer)
        for module in layer.modules()
    }
    return [unit for unit in units if id(model.get_submodule(unit.module)) in inside]


def leave_unread(model: Any, unit: Unit, place: Placement) -> None:
    """Put stand-ins where the unit's weights will be. They are NaN where they can, so that no use goes unnoticed."""
    plain = model.get_submodule(unit.module)
    owner = _packed_zeros(plain, place, where=unit.module) if unit.replaced else plain
    model.set_submodule(unit.module, owner)
    for name, tensor in [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]:
        if unit.replaced or name in unit.parts:
            value = float("nan") if tensor.is_floating_point() else 0
            one = torch.full((1,), value, dtype=tensor.dtype, device=place.device)
            put(owner, name, one.expand(tensor.shape))
    vars(owner).setdefault(UNREAD, []).append(_Unread(unit, place, plain if unit.replaced else None))


def _packed_zeros(plain: Any, place: Placement, *, where: str) -> nn.Module:
    """A layer of the kind that will be in the place of the plain one."""
    weights = {"weight": plain.weight} if plain.bias is None else {"weight": plain.weight, "bias": plain.bias}
    zeros = {name: torch.zeros(weight.shape, device=place.device) for name, weight in weights.items()}
    return make_layer(plain, zeros, replace(place, target=place.packing or "dense", stored=None), where=where)


def _become(layer: nn.Module, other: nn.Module) -> None:
    """Take over the weights of a layer of the same kind, and what else is known of them."""
    for name, parameter in other.named_parameters(recurse=False):
        parameter.requires_grad_(layer.get_parameter(name).requires_grad)
    layer._parameters, layer._buffers = other._parameters, other._buffers
    known = {name: value for name, value in vars(other).items() if not name.startswith("_") and name != "training"}
    vars(layer).update(known)


def read_weights(root: nn.Module) -> None:
    """Put the weights of `root` and all below it in their places, if some are unread."""
    owners = [module for module in root.modules() if UNREAD in vars(module)]
    unread = {id(waiting.unit): (owner, waiting) for owner in owners for waiting in vars(owner).pop(UNREAD)}
    if unread:
        try:
            _read(unread)
        except (SafetensorError, OSError) as err:
            raise ModelError(
                f"The weights of the model can no longer be read: {err}.", todo="Leave its files where they are."
            ) from err


def _read(unread: dict[int, tuple[nn.Module, _Unread]]) -> None:
    waiting = [waiting for _, waiting in unread.values()]
    files = {file for one in waiting for file, _ in one.unit.parts.values()}
    with opened_files(files) as opened:
        for unit, tensors in read_units([one.unit for one in waiting], opened, waiting[0].place.device):
            owner, one = unread[id(unit)]
            if one.plain is None:
                for name, tensor in tensors.items():
                    known = getattr(owner, name)
                    known.data = tensor.to(known.dtype)
            else:
                _become(owner, make_layer(one.plain, tensors, one.place, where=unit.module))


@contextlib.contextmanager
def read_in_turn(root: nn.Module) -> Iterator[None]:
    """Inside, decoder layers whose weights are unread have them while they compute, and are unread again afterwards."""
    kept: dict[nn.Module, contextlib.ExitStack] = {}

    def read(layer: nn.Module, _args: Any) -> None:
        kept[layer] = contextlib.ExitStack()
        kept[layer].enter_context(read_for_now(layer))

    def forget(layer: nn.Module, _args: Any, _output: Any) -> None:
        kept.pop(layer, contextlib.ExitStack()).close()

    layers = [module for module in root.modules() if isinstance(module, GradientCheckpointingLayer)]
    handles = [layer.register_forward_pre_hook(read) for layer in layers]
    handles += [layer.register_forward_hook(forget, always_call=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def read_stacked_in_turn(root: nn.Module) -> contextlib.AbstractContextManager[None]:
    """`read_in_turn` where weights of several experts are one tensor: grouped matmuls refuse the stand-ins' strides."""
    unread = [module for module in root.modules() if UNREAD in vars(module)]
    stacked = any(parameter.ndim > 2 for module in unread for parameter in module.parameters(recurse=False))
    return read_in_turn(root) if stacked else contextlib.nullcontext()


@contextlib.contextmanager
def read_for_now(root: nn.Module) -> Iterator[None]:
    """Inside, `root` and all below it have their weights; those that were unread are so again afterwards."""
    stand_ins = [_StandIn.of(module) for module in root.modules() if UNREAD in vars(module)]
    try:
        read_weights(root)
        yield
    finally:
        for stand_in in stand_ins:
            stand_in.put_back()


@dataclass(frozen=True)
class _StandIn:
    """What is in the place of a module's weights while they are unread."""

    owner: nn.Module
    unread: list[_Unread]
    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, Tensor | None]
    values: list[tuple[Tensor, Tensor]]
    """Of each of them, what it holds."""

    @classmethod
    def of(cls, owner: nn.Module) -> _StandIn:
        tensors = [*owner.parameters(recurse=False), *owner.buffers(recurse=False)]
        values = [(tensor, tensor.data) for tensor in tensors]
        return cls(owner, vars(owner)[UNREAD], dict(owner._parameters), dict(owner._buffers), values)

    def put_back(self) -> None:
        for tensor, value in self.values:
            tensor.data = value
        self.owner._parameters, self.owner._buffers = dict(self.parameters), dict(self.buffers)
        vars(self.owner)[UNREAD] = self.unread
