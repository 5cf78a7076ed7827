"""Tensor parallelism: every linear layer that the model's own plan names is cut over the ranks of a mesh.

A `colwise` layer is cut by outputs: each rank computes some of them from the whole input. A `rowwise` layer is cut by
inputs: each rank computes a share of every output from the inputs that it has, and the shares are added up. Attention
and MLP are a few colwise layers followed by a rowwise one, so a decoder layer sends its activations twice forward and
twice back. An adapter is cut with its layer: of its two matrices, the one at the cut is divided, and the other one is
whole on every rank. Of its gradient each rank finds a share, and those are summed once a step (`SharedGradients`).

All ranks of the mesh see the same tokens, and the loss of each is the whole loss. `borders` has what is sent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, cast, runtime_checkable

import torch
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora.dora import DoraLinearLayer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from pantheraml.base.errors import UnsupportedModelError
from pantheraml.parallel.borders import (
    Conversion,
    LocalParameters,
    Place,
    SharedGradients,
    add_up,
    distribute,
    divide,
    enter,
    join,
    once,
    own_part,
    shared_whole,
)
from pantheraml.parallel.vocabulary import cut_embedding

_OTHER_MODES = "parallel.shard or parallel.pipeline divide any model."


@runtime_checkable
class PackedLayer(Protocol):
    """A frozen linear layer whose weight is not a plain matrix, and which cuts itself."""

    in_features: int
    out_features: int
    bias: Tensor | None

    def keep_rows(self, rows: slice) -> None:
        """Become the layer of these outputs alone."""

    def keep_columns(self, columns: slice) -> None:
        """Become the layer of these inputs alone. The bias stays."""


class Cut(Enum):
    OUTPUTS = "outputs"
    INPUTS = "inputs"
    NOWHERE = "nowhere"
    """The layer is whole on every rank, but sees one rank's part of the activations."""


@dataclass(frozen=True)
class Style:
    cut: Cut
    alone: bool = False
    """Input and output are whole on every rank: the layer is not one of a pair that passes parts on."""


_STYLES = {
    "colwise": Style(Cut.OUTPUTS),
    "colwise_gather_output": Style(Cut.OUTPUTS, alone=True),
    "colwise_rep": Style(Cut.OUTPUTS, alone=True),
    "rowwise": Style(Cut.INPUTS),
    "rowwise_split_input": Style(Cut.INPUTS, alone=True),
    "rowwise_rep": Style(Cut.INPUTS, alone=True),
    "replicated_with_grad_allreduce": Style(Cut.NOWHERE),
}
_VOCABULARY_STYLES = ("embedding_rowwise",)
"""What plans say of the input embedding, which is cut over the vocabulary whether a plan names it or not."""


@dataclass(frozen=True)
class _Planned:
    """One layer that is to be cut."""

    name: str
    layer: nn.Module
    parent: nn.Module
    style: Style

    @property
    def pieces(self) -> int:
        """How many equal pieces there are that a cut must not go through: heads in attention, else features."""
        base = _base(self.layer)
        size = cast(int, base.out_features if self.style.cut is Cut.OUTPUTS else base.in_features)
        width = 1 if self.style.alone else cast(int, getattr(self.parent, "head_dim", 1))
        return size // width if size % width == 0 else 1


def _nothing(_module: nn.Module) -> None:
    """There is nothing to prepare."""


def shard_tensors(
    model: nn.Module, mesh: DeviceMesh, *, prepare: Callable[[nn.Module], None] = _nothing
) -> SharedGradients:
    """Cut a causal language model, with or without LoRA or DoRA adapters, over the one dimension of `mesh`, in place.

    Every rank comes with the same whole model. Parameters keep their names. Those that are cut, and all that are
    trained, become DTensors on `mesh`. After the backward passes of a step, and `add_up` of what is returned, each has
    its right gradient. `prepare` is called with each layer right before it is cut, and may put its weights in their
    places only then.
    """
    whole: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    layers = _planned_layers(whole)
    _check(whole, layers, mesh.size())
    shared: dict[nn.Module, _SharedInput] = {}
    places: list[Place] = []
    for planned in layers:
        if planned.parent not in shared:
            shared[planned.parent] = _SharedInput(planned.parent, mesh)
        prepare(planned.layer)
        if planned.style.cut is Cut.NOWHERE:
            places += _hold_whole(planned.layer.modules(), planned.layer, mesh, shared_whole)
        else:
            places += _cut(planned, mesh, shared[planned.parent])
    prepare(whole)
    places += _cut_vocabulary(whole, mesh)
    for module in list(model.modules()):
        _hold_whole([module], module, mesh, own_part)
    return SharedGradients(places, mesh)


def _planned_layers(whole: Any) -> list[_Planned]:
    """From the model's own plan: all but the input embedding and the output head."""
    plan: dict[str, str] = dict(whole.tp_plan)
    head = whole.get_output_embeddings()
    found = []
    for pattern, style in plan.items():
        expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        names = [name for name, _ in whole.named_modules() if expression.fullmatch(name)]
        names += [name for name, _ in whole.named_parameters() if expression.fullmatch(name)]
        if names and style not in (*_STYLES, *_VOCABULARY_STYLES):
            raise UnsupportedModelError(
                f"Tensor parallelism does not know the style {style!r}, which {type(whole).__name__} wants.",
                where=names[0],
                todo=_OTHER_MODES,
            )
        for name in names if style in _STYLES else ():
            layer = whole.get_submodule(name)
            if layer is not head:
                found.append(_Planned(name, layer, whole.get_submodule(name.rpartition(".")[0]), _STYLES[style]))
    if not found:
        raise UnsupportedModelError(f"{type(whole).__name__} has no plan for tensor parallelism.", todo=_OTHER_MODES)
    return found


def _check(whole: Any, layers: list[_Planned], degree: int) -> None:
    """Whatever can be told before anything is changed."""
    cut = [planned for planned in layers if planned.style.cut is not Cut.NOWHERE]
    for planned in cut:
        if not isinstance(_base(planned.layer), nn.Linear | PackedLayer):
            raise _cannot_cut(planned.layer, planned.name)
    embedding, head = whole.get_input_embeddings(), whole.get_output_embeddings()
    if not isinstance(_base(head), nn.Linear):
        raise _cannot_cut(head, "output head")
    if not isinstance(embedding, nn.Embedding):
        raise _cannot_cut(embedding, "input embedding")
    possible = math.gcd(*(planned.pieces for planned in cut))
    if possible % degree:
        worst = min(cut, key=lambda planned: math.gcd(planned.pieces, degree))
        degrees = [str(d) for d in range(2, possible + 1) if possible % d == 0]
        raise UnsupportedModelError(
            f"This model cannot be cut {degree} ways: a layer has {worst.pieces} heads or features to divide.",
            where=worst.name,
            todo=(f"Use parallel.tensor = {' or '.join(degrees)}; " if degrees else "") + _OTHER_MODES,
        )
    size = embedding.num_embeddings
    if (degree - 1) * -(-size // degree) >= size:
        raise UnsupportedModelError(f"A vocabulary of {size} cannot be cut {degree} ways.", todo=_OTHER_MODES)


def _cannot_cut(layer: nn.Module, name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"Tensor parallelism cannot cut a layer of type {type(layer).__name__}.", where=name, todo=_OTHER_MODES
    )


def _cut(planned: _Planned, mesh: DeviceMesh, shared_input: _SharedInput) -> list[Place]:
    """The parameters that this made DTensors."""
    layer, style = planned.layer, planned.style
    out_features = cast(int, _base(layer).out_features)
    places = list(_cut_parameters(layer, style.cut, mesh))
    LocalParameters(layer, places)
    if style.cut is Cut.OUTPUTS:
        _convert_input(layer, shared_input)
        if style.alone:
            _convert_output(layer, lambda part: join(part, out_features, mesh))
    else:
        if style.alone:
            _convert_input(layer, lambda whole: divide(whole, mesh))
        _convert_output(layer, lambda share: add_up(share, mesh))
    return places


def _cut_parameters(layer: nn.Module, cut: Cut, mesh: DeviceMesh) -> Iterator[Place]:
    """Cuts a linear layer and its adapters; the parameters that this makes DTensors."""
    base = _base(layer)
    if isinstance(base, nn.Linear):
        yield from _cut_linear(base, cut, mesh)
    else:
        _cut_packed(cast(PackedLayer, base), cut, mesh)
    if not isinstance(layer, LoraLinear):
        return
    for down, up in zip(layer.lora_A.values(), layer.lora_B.values(), strict=True):
        if cut is Cut.OUTPUTS:
            yield _spread(down, "weight", mesh, Replicate(), shared_whole)
            yield from _cut_linear(up, cut, mesh)
        else:
            yield from _cut_linear(down, cut, mesh)
            yield _spread(up, "weight", mesh, Replicate(), shared_whole)
            if up.bias is not None:
                yield _spread(up, "bias", mesh, Replicate(), once)
    for adapter, magnitude in list(layer.lora_magnitude_vector.items()):
        if cut is Cut.OUTPUTS:
            yield _spread(magnitude, "weight", mesh, Shard(0), own_part)
        else:
            divided = _DividedDora(magnitude, mesh)
            layer.lora_magnitude_vector[adapter] = divided
            yield _spread(divided, "weight", mesh, Replicate(), shared_whole)


def _cut_linear(linear: nn.Linear, cut: Cut, mesh: DeviceMesh) -> Iterator[Place]:
    if cut is Cut.OUTPUTS:
        yield _spread(linear, "weight", mesh, Shard(0), own_part)
        if linear.bias is not None:
            yield _spread(linear, "bias", mesh, Shard(0), own_part)
    else:
        yield _spread(linear, "weight", mesh, Shard(1), own_part)
        if linear.bias is not None:
            yield _spread(linear, "bias", mesh, Replicate(), once)


def _cut_packed(packed: PackedLayer, cut: Cut, mesh: DeviceMesh) -> None:
    size = packed.out_features if cut is Cut.OUTPUTS else packed.in_features
    length = -(-size // mesh.size())
    part = slice(mesh.get_local_rank() * length, min((mesh.get_local_rank() + 1) * length, size))
    if cut is Cut.OUTPUTS:
        packed.keep_rows(part)
    else:
        packed.keep_columns(part)
        if mesh.get_local_rank() > 0:
            packed.bias = None  # the first rank's counts


def _cut_vocabulary(whole: Any, mesh: DeviceMesh) -> list[Place]:
    """Input embedding and output head, whether they share a weight or not; the parameters of the head."""
    embedding, head = whole.get_input_embeddings(), whole.get_output_embeddings()
    tied = getattr(head, "weight", None) is embedding.weight
    planned = _Planned("output head", head, whole, Style(Cut.OUTPUTS, alone=True))
    places = _cut(planned, mesh, _SharedInput(whole, mesh))
    cut_embedding(embedding, mesh, weight=head.weight if tied else None)
    return places


def _hold_whole(
    modules: Iterable[nn.Module], layer: nn.Module, mesh: DeviceMesh, conversion: Conversion
) -> list[Place]:
    """What trains in `modules` and is not a DTensor yet becomes a replicated one, and `layer` uses it as `conversion`
    says."""
    places = [
        _spread(module, name, mesh, Replicate(), conversion)
        for module in modules
        for name, parameter in list(module.named_parameters(recurse=False))
        if parameter.requires_grad and not isinstance(parameter, DTensor)
    ]
    if places:
        LocalParameters(layer, places)
    return places


def _spread(owner: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, conversion: Conversion) -> Place:
    owner.register_parameter(name, distribute(owner.get_parameter(name), mesh, placement))
    return Place(owner, name, conversion)


def _base(layer: nn.Module) -> Any:
    return layer.get_base_layer() if isinstance(layer, LoraLinear) else layer


def _convert_input(layer: nn.Module, conversion: Callable[[Tensor], Tensor]) -> None:
    layer.register_forward_pre_hook(lambda _layer, args: (conversion(args[0]), *args[1:]))


def _convert_output(layer: nn.Module, conversion: Callable[[Tensor], Tensor]) -> None:
    layer.register_forward_hook(lambda _layer, _args, output: conversion(output))


class _SharedInput:
    """Layers of one block that are given the same tensor enter it once: their gradients are added before they are
    sent, one all-reduce for queries, keys and values together."""

    def __init__(self, block: nn.Module, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._last: tuple[Tensor, Tensor] | None = None
        block.register_forward_hook(self._forget, always_call=True)

    def __call__(self, whole: Tensor) -> Tensor:
        if self._last is None or self._last[0] is not whole:
            self._last = whole, enter(whole, self._mesh)
        return self._last[1]

    def _forget(self, _block: nn.Module, _args: Any, _output: Any) -> None:
        self._last = None


class _DividedDora(DoraLinearLayer):
    """DoRA's magnitude over a weight of which this rank has some inputs: the norm of an output's row is a sum."""

    def __init__(self, original: DoraLinearLayer, mesh: DeviceMesh) -> None:
        super().__init__(original.fan_in_fan_out)
        self._mesh = mesh
        self.weight = original.weight

    def get_weight_norm(
        self, weight: Tensor, lora_weight: Tensor, scaling: float, adapter_name: str | None = None
    ) -> Tensor:
        part = super().get_weight_norm(weight, lora_weight, scaling, adapter_name=adapter_name)
        with torch.no_grad():  # DoRA's gradient takes the norm for a constant
            return add_up(part.square(), self._mesh).sqrt()
