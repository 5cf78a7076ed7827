"""Tensor parallelism: shard the linear layers named by the model's own TP plan over the ranks of a mesh.

A `colwise` layer is sharded by outputs: each rank computes some of them from the full input. A `rowwise` layer is
sharded by inputs: each rank computes a partial sum of every output, followed by an all-reduce. Attention and MLP are
colwise layers followed by a rowwise one, so a decoder layer takes two all-reduces forward and two backward. Of a LoRA
adapter, the matrix on the sharded side is sharded with its layer and the other is replicated; the replicated one's
gradients are partial per rank and are all-reduced once per step (`PartialGradients`).

All ranks of the mesh see the same tokens and compute the full loss. The collectives are in `tp_mappings`.
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
from pantheraml.parallel.tp_mappings import (
    Conversion,
    LocalParameters,
    ParameterSlot,
    PartialGradients,
    copy_to_tp,
    distribute,
    first_rank_only,
    gather_from_tp,
    partial_grad,
    reduce_from_tp,
    scatter_to_tp,
    to_local,
)
from pantheraml.parallel.vocabulary import shard_embedding

_OTHER_MODES = "Use parallel.shard or parallel.pipeline, which work with any model."


@runtime_checkable
class QuantizedLayer(Protocol):
    """A frozen quantized linear layer that can slice its own weight."""

    in_features: int
    out_features: int
    bias: Tensor | None

    def keep_rows(self, rows: slice) -> None:
        """Keep only these output features."""

    def keep_columns(self, columns: slice) -> None:
        """Keep only these input features. The bias stays."""


class ShardBy(Enum):
    OUTPUTS = "outputs"
    INPUTS = "inputs"
    NOTHING = "nothing"
    """The layer is replicated, but sees only this rank's shard of the activations."""


@dataclass(frozen=True)
class Style:
    shard_by: ShardBy
    replicated_io: bool = False
    """Input and output are replicated: the layer is not part of a colwise/rowwise pair."""


_STYLES = {
    "colwise": Style(ShardBy.OUTPUTS),
    "colwise_gather_output": Style(ShardBy.OUTPUTS, replicated_io=True),
    "colwise_rep": Style(ShardBy.OUTPUTS, replicated_io=True),
    "rowwise": Style(ShardBy.INPUTS),
    "rowwise_split_input": Style(ShardBy.INPUTS, replicated_io=True),
    "rowwise_rep": Style(ShardBy.INPUTS, replicated_io=True),
    "replicated_with_grad_allreduce": Style(ShardBy.NOTHING),
}
_VOCABULARY_STYLES = ("embedding_rowwise",)
"""Plan styles of the input embedding, which is vocab-parallel whether the plan names it or not."""


@dataclass(frozen=True)
class _PlannedLayer:
    """A layer to shard."""

    name: str
    layer: nn.Module
    parent: nn.Module
    style: Style

    @property
    def units(self) -> int:
        """Number of indivisible units along the sharded dimension: heads in attention, features elsewhere."""
        base = _base(self.layer)
        size = cast(int, base.out_features if self.style.shard_by is ShardBy.OUTPUTS else base.in_features)
        width = 1 if self.style.replicated_io else cast(int, getattr(self.parent, "head_dim", 1))
        return size // width if size % width == 0 else 1


def _nothing(_module: nn.Module) -> None:
    """No-op default of `prepare`."""


def shard_tensors(
    model: nn.Module, mesh: DeviceMesh, *, prepare: Callable[[nn.Module], None] = _nothing
) -> PartialGradients:
    """Shard a causal language model, with or without LoRA or DoRA adapters, in place over the 1-D `mesh`.

    Every rank passes the same full model. Parameters keep their names; sharded and trainable ones become DTensors on
    `mesh`. Gradients are correct once `all_reduce` of the returned PartialGradients was called after a step's last
    backward. `prepare` is called with each layer right before it is sharded and may load its weights only then.
    """
    whole: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    layers = _planned_layers(whole)
    _check(whole, layers, mesh.size())
    shared: dict[nn.Module, _SharedInput] = {}
    slots: list[ParameterSlot] = []
    for planned in layers:
        if planned.parent not in shared:
            shared[planned.parent] = _SharedInput(planned.parent, mesh)
        prepare(planned.layer)
        if planned.style.shard_by is ShardBy.NOTHING:
            slots += _replicate_trainable(planned.layer.modules(), planned.layer, mesh, partial_grad)
        else:
            slots += _shard_layer(planned, mesh, shared[planned.parent])
    prepare(whole)
    slots += _shard_vocabulary(whole, mesh)
    for module in list(model.modules()):
        _replicate_trainable([module], module, mesh, to_local)
    return PartialGradients(slots, mesh)


def _planned_layers(whole: Any) -> list[_PlannedLayer]:
    """Resolve the model's own TP plan, without input embedding and output head."""
    plan: dict[str, str] = dict(whole.tp_plan)
    head = whole.get_output_embeddings()
    found = []
    for pattern, style in plan.items():
        expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        names = [name for name, _ in whole.named_modules() if expression.fullmatch(name)]
        names += [name for name, _ in whole.named_parameters() if expression.fullmatch(name)]
        if names and style not in (*_STYLES, *_VOCABULARY_STYLES):
            raise UnsupportedModelError(
                f"Tensor parallelism does not support the style {style!r} in the plan of {type(whole).__name__}.",
                where=names[0],
                fix=_OTHER_MODES,
            )
        for name in names if style in _STYLES else ():
            layer = whole.get_submodule(name)
            if layer is not head:
                found.append(_PlannedLayer(name, layer, whole.get_submodule(name.rpartition(".")[0]), _STYLES[style]))
    if not found:
        raise UnsupportedModelError(f"{type(whole).__name__} has no tensor-parallel plan.", fix=_OTHER_MODES)
    return found


def _check(whole: Any, layers: list[_PlannedLayer], degree: int) -> None:
    """Validate everything before the first change."""
    sharded = [planned for planned in layers if planned.style.shard_by is not ShardBy.NOTHING]
    for planned in sharded:
        if not isinstance(_base(planned.layer), nn.Linear | QuantizedLayer):
            raise _cannot_shard(planned.layer, planned.name)
    embedding, head = whole.get_input_embeddings(), whole.get_output_embeddings()
    if not isinstance(_base(head), nn.Linear):
        raise _cannot_shard(head, "output head")
    if not isinstance(embedding, nn.Embedding):
        raise _cannot_shard(embedding, "input embedding")
    possible = math.gcd(*(planned.units for planned in sharded))
    if possible % degree:
        worst = min(sharded, key=lambda planned: math.gcd(planned.units, degree))
        degrees = [str(d) for d in range(2, possible + 1) if possible % d == 0]
        raise UnsupportedModelError(
            f"This model cannot be sharded over {degree} tensor-parallel ranks: a layer has {worst.units} heads or"
            " features.",
            where=worst.name,
            fix=(f"Use parallel.tensor = {' or '.join(degrees)}. " if degrees else "") + _OTHER_MODES,
        )
    size = embedding.num_embeddings
    if (degree - 1) * -(-size // degree) >= size:
        raise UnsupportedModelError(
            f"A vocabulary of {size} cannot be sharded over {degree} tensor-parallel ranks.", fix=_OTHER_MODES
        )


def _cannot_shard(layer: nn.Module, name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"Tensor parallelism cannot shard a layer of type {type(layer).__name__}.", where=name, fix=_OTHER_MODES
    )


def _shard_layer(planned: _PlannedLayer, mesh: DeviceMesh, shared_input: _SharedInput) -> list[ParameterSlot]:
    """Shard a layer and hook up its collectives; return the parameters that became DTensors."""
    layer, style = planned.layer, planned.style
    out_features = cast(int, _base(layer).out_features)
    slots = list(_shard_parameters(layer, style.shard_by, mesh))
    LocalParameters(layer, slots)
    if style.shard_by is ShardBy.OUTPUTS:
        _convert_input(layer, shared_input)
        if style.replicated_io:
            _convert_output(layer, lambda part: gather_from_tp(part, out_features, mesh))
    else:
        if style.replicated_io:
            _convert_input(layer, lambda whole: scatter_to_tp(whole, mesh))
        _convert_output(layer, lambda share: reduce_from_tp(share, mesh))
    return slots


def _shard_parameters(layer: nn.Module, shard_by: ShardBy, mesh: DeviceMesh) -> Iterator[ParameterSlot]:
    """Shard a linear layer and its adapters, yielding the parameters that became DTensors."""
    base = _base(layer)
    if isinstance(base, nn.Linear):
        yield from _shard_linear(base, shard_by, mesh)
    else:
        _shard_quantized(cast(QuantizedLayer, base), shard_by, mesh)
    if not isinstance(layer, LoraLinear):
        return
    for down, up in zip(layer.lora_A.values(), layer.lora_B.values(), strict=True):
        if shard_by is ShardBy.OUTPUTS:
            yield _distribute_slot(down, "weight", mesh, Replicate(), partial_grad)
            yield from _shard_linear(up, shard_by, mesh)
        else:
            yield from _shard_linear(down, shard_by, mesh)
            yield _distribute_slot(up, "weight", mesh, Replicate(), partial_grad)
            if up.bias is not None:
                yield _distribute_slot(up, "bias", mesh, Replicate(), first_rank_only)
    for adapter, magnitude in list(layer.lora_magnitude_vector.items()):
        if shard_by is ShardBy.OUTPUTS:
            yield _distribute_slot(magnitude, "weight", mesh, Shard(0), to_local)
        else:
            sharded = _RowwiseDora(magnitude, mesh)
            layer.lora_magnitude_vector[adapter] = sharded
            yield _distribute_slot(sharded, "weight", mesh, Replicate(), partial_grad)


def _shard_linear(linear: nn.Linear, shard_by: ShardBy, mesh: DeviceMesh) -> Iterator[ParameterSlot]:
    if shard_by is ShardBy.OUTPUTS:
        yield _distribute_slot(linear, "weight", mesh, Shard(0), to_local)
        if linear.bias is not None:
            yield _distribute_slot(linear, "bias", mesh, Shard(0), to_local)
    else:
        yield _distribute_slot(linear, "weight", mesh, Shard(1), to_local)
        if linear.bias is not None:
            yield _distribute_slot(linear, "bias", mesh, Replicate(), first_rank_only)


def _shard_quantized(layer: QuantizedLayer, shard_by: ShardBy, mesh: DeviceMesh) -> None:
    size = layer.out_features if shard_by is ShardBy.OUTPUTS else layer.in_features
    length = -(-size // mesh.size())
    part = slice(mesh.get_local_rank() * length, min((mesh.get_local_rank() + 1) * length, size))
    if shard_by is ShardBy.OUTPUTS:
        layer.keep_rows(part)
    else:
        layer.keep_columns(part)
        if mesh.get_local_rank() > 0:
            layer.bias = None  # only the first rank adds it


def _shard_vocabulary(whole: Any, mesh: DeviceMesh) -> list[ParameterSlot]:
    """Shard input embedding and output head, tied or not; return the parameters of the head."""
    embedding, head = whole.get_input_embeddings(), whole.get_output_embeddings()
    tied = getattr(head, "weight", None) is embedding.weight
    planned = _PlannedLayer("output head", head, whole, Style(ShardBy.OUTPUTS, replicated_io=True))
    slots = _shard_layer(planned, mesh, _SharedInput(whole, mesh))
    shard_embedding(embedding, mesh, weight=head.weight if tied else None)
    return slots


def _replicate_trainable(
    modules: Iterable[nn.Module], layer: nn.Module, mesh: DeviceMesh, conversion: Conversion
) -> list[ParameterSlot]:
    """Turn remaining trainable parameters of `modules` into replicated DTensors, used by `layer` via `conversion`."""
    slots = [
        _distribute_slot(module, name, mesh, Replicate(), conversion)
        for module in modules
        for name, parameter in list(module.named_parameters(recurse=False))
        if parameter.requires_grad and not isinstance(parameter, DTensor)
    ]
    if slots:
        LocalParameters(layer, slots)
    return slots


def _distribute_slot(
    owner: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, conversion: Conversion
) -> ParameterSlot:
    owner.register_parameter(name, distribute(owner.get_parameter(name), mesh, placement))
    return ParameterSlot(owner, name, conversion)


def _base(layer: nn.Module) -> Any:
    return layer.get_base_layer() if isinstance(layer, LoraLinear) else layer


def _convert_input(layer: nn.Module, conversion: Callable[[Tensor], Tensor]) -> None:
    layer.register_forward_pre_hook(lambda _layer, args: (conversion(args[0]), *args[1:]))


def _convert_output(layer: nn.Module, conversion: Callable[[Tensor], Tensor]) -> None:
    layer.register_forward_hook(lambda _layer, _args, output: conversion(output))


class _SharedInput:
    """Apply `copy_to_tp` once to an input shared by several layers of a block.

    Their input gradients are summed before the all-reduce: one for q, k and v together.
    """

    def __init__(self, block: nn.Module, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._last: tuple[Tensor, Tensor] | None = None
        block.register_forward_hook(self._clear, always_call=True)

    def __call__(self, whole: Tensor) -> Tensor:
        if self._last is None or self._last[0] is not whole:
            self._last = whole, copy_to_tp(whole, self._mesh)
        return self._last[1]

    def _clear(self, _block: nn.Module, _args: Any, _output: Any) -> None:
        self._last = None


class _RowwiseDora(DoraLinearLayer):  # type: ignore[misc]  # PEFT is not typed
    """DoRA magnitude for a rowwise layer: the squared weight norm is a sum over ranks."""

    def __init__(self, original: DoraLinearLayer, mesh: DeviceMesh) -> None:
        super().__init__(original.fan_in_fan_out)
        self._mesh = mesh
        self.weight = original.weight

    def get_weight_norm(
        self, weight: Tensor, lora_weight: Tensor, scaling: float, adapter_name: str | None = None
    ) -> Tensor:
        part = super().get_weight_norm(weight, lora_weight, scaling, adapter_name=adapter_name)
        with torch.no_grad():  # DoRA treats the norm as a constant in backward
            return reduce_from_tp(part.square(), self._mesh).sqrt()
