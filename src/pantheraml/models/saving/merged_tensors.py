"""The tensors of a model as a plain checkpoint has them: adapters merged, quantized weights dequantized.

Each tensor is computed when it is written and dropped afterwards, so that saving needs memory for one weight, not for a
second model. The model itself is not touched and can be trained on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from pantheraml.base.errors import ModelError, UnsupportedModelError
from pantheraml.models.derived_class import RuntimeSubclass
from pantheraml.models.quantize.quantized_linear import QuantizedLinear
from pantheraml.models.trained_copies import share_one_copy, trained_copy

_ADAPTED = ("Linear", "Embedding", "Conv1D")


@dataclass(frozen=True)
class LazyTensor:
    """A tensor of a checkpoint that is computed on request, on the CPU and contiguous."""

    shape: torch.Size
    dtype: torch.dtype
    compute: Callable[[], Tensor]

    def read(self) -> Tensor:
        return self.compute().detach().to("cpu", self.dtype).contiguous()


def plain_class(model: PreTrainedModel) -> Any:
    """Return the transformers class of `model`."""
    kinds = [kind for kind in type(model).__mro__ if issubclass(kind, PreTrainedModel)]
    return cast(Any, next(kind for kind in kinds if not issubclass(kind, RuntimeSubclass)))


def plain_skeleton(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model of the same architecture on the meta device, without adapters or quantization."""
    with torch.device("meta"):
        return cast(PreTrainedModel, plain_class(model)._from_config(copy.deepcopy(model.config)))


def merged_tensors(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, LazyTensor]:
    """Return the tensors of `model` by their names in a plain model, floats in `dtype`.

    Tied weights are listed once, by the name that checkpoints use.
    """
    found = dict(_tensors_of(model, "", dtype, _kept_in_fp32(model)))
    skeleton = plain_skeleton(model)
    tied = set() if unties_head(model) else set(skeleton.all_tied_weights_keys)
    expected = {name: tensor.shape for name, tensor in skeleton.state_dict().items() if name not in tied}
    tensors = {name: tensor for name, tensor in found.items() if name not in tied}
    if {name: tensor.shape for name, tensor in tensors.items()} != expected:
        different = sorted(
            name for name in {*expected, *tensors} if name not in tensors or expected.get(name) != tensors[name].shape
        )
        raise UnsupportedModelError(
            f"This {plain_class(model).__name__} cannot be saved as a plain model: {different[0]} is not as in a new"
            " model of its config.",
            fix="Save the adapter with save_lora.",
        )
    return tensors


def unties_head(model: PreTrainedModel) -> bool:
    """Return whether training separated weights that the architecture ties: the embedding and the output head."""
    tied = {name for pair in model.all_tied_weights_keys.items() for name in pair}
    trained = [module for module in model.modules() if isinstance(module, BaseTunerLayer | ModulesToSaveWrapper)]
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    return bool(tied) and any(module is end for module in trained for end in ends) and not share_one_copy(*ends)


def _kept_in_fp32(model: Any) -> tuple[str, ...]:
    """Return parts of the names of tensors that transformers keeps in float32."""
    lists = (getattr(model, name, None) or () for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"))
    return tuple(name for names in lists for name in names)


def _tensors_of(
    module: nn.Module, prefix: str, dtype: torch.dtype, in_fp32: tuple[str, ...]
) -> Iterator[tuple[str, LazyTensor]]:
    def named(own: str) -> str:
        return f"{prefix}.{own}" if prefix else own

    def target(name: str, tensor: Tensor) -> torch.dtype:
        if not tensor.is_floating_point():
            return tensor.dtype
        return torch.float32 if any(part in name for part in in_fp32) else dtype

    if isinstance(module, ModulesToSaveWrapper):
        yield from _tensors_of(trained_copy(module), prefix, dtype, in_fp32)
        return
    if isinstance(module, BaseTunerLayer):
        yield from _adapted_tensors(module, prefix, dtype)
        return
    if isinstance(module, QuantizedLinear):
        yield named("weight"), LazyTensor(_dense_shape(module), dtype, lambda: _dense(module).weight)
        if module.bias is not None:
            yield named("bias"), LazyTensor(module.bias.shape, dtype, lambda: cast(Tensor, module.bias))
        return
    own: Mapping[str, Tensor | None] = {
        **module._parameters,
        **{name: b for name, b in module._buffers.items() if name not in module._non_persistent_buffers_set},
    }
    for name, tensor in own.items():
        if tensor is not None:
            full = named(name)
            yield full, LazyTensor(tensor.shape, target(full, tensor), partial(_same, tensor))
    for name, child in module._modules.items():
        if child is not None:
            yield from _tensors_of(child, named(name), dtype, in_fp32)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _adapted_tensors(layer: Any, prefix: str, dtype: torch.dtype) -> Iterator[tuple[str, LazyTensor]]:
    base = layer.get_base_layer()
    kind = type(base).__name__
    if not isinstance(base, QuantizedLinear) and kind not in _ADAPTED:
        raise UnsupportedModelError(
            f"The adapter of {prefix} cannot be merged: it is over a {kind}.", fix="Save the adapter with save_lora."
        )
    bias = getattr(base, "bias", None)
    adds_bias = not layer.merged and any(map(getattr(layer, "lora_bias", {}).get, layer.active_adapters))
    if adds_bias and bias is None:
        raise UnsupportedModelError(
            f"The adapter of {prefix} cannot be merged: it has a bias, and its layer has none.",
            fix="Save the adapter with save_lora.",
        )
    shape = _dense_shape(base) if isinstance(base, QuantizedLinear) else base.weight.shape
    yield f"{prefix}.weight", LazyTensor(shape, dtype, lambda: cast(Tensor, merged_layer(layer, prefix).weight))
    if bias is not None:
        read = (lambda: cast(Tensor, merged_layer(layer, prefix).bias)) if adds_bias else partial(_same, bias)
        yield f"{prefix}.bias", LazyTensor(bias.shape, dtype, read)


def _dense(layer: QuantizedLinear) -> Any:
    return layer.to_linear(torch.float32)


def _dense_shape(layer: QuantizedLinear) -> torch.Size:
    size = (layer.out_features, layer.in_features)
    return torch.Size(reversed(size) if getattr(layer, "from_conv1d", False) else size)


@torch.no_grad()
def merged_layer(layer: Any, name: str) -> Any:
    """Return the base of an adapted layer with its active adapters merged, summed in float32.

    PEFT's own `merge` runs on a stand-in that shares the adapter but has a float32 copy of the base layer, so every
    variant (DoRA, rsLoRA, transposed layers) is PEFT's, and the layer stays as it is.
    """
    base = layer.get_base_layer()
    if layer.merged:
        return base
    quantized = isinstance(base, QuantizedLinear)
    dense = _dense(base) if quantized else _float_copy(base)
    kind: Any = type(layer)
    stand_in = kind.__new__(kind)
    stand_in.__dict__.update(
        {**layer.__dict__, "_modules": {**layer._modules, "base_layer": dense}, "merged_adapters": []}
    )
    if quantized:
        stand_in.fan_in_fan_out = getattr(base, "from_conv1d", False)
    try:
        stand_in.merge(safe_merge=True)
    except ValueError as err:
        raise ModelError(
            f"The adapter of {name} cannot be merged: {err}",
            fix="Save the adapter alone: save_pretrained, or save_method='lora'.",
        ) from err
    return dense


def _float_copy(base: nn.Module) -> Any:
    """Return a layer of the same kind with its weight and bias in float32."""
    copied = type(base).__new__(type(base))
    own = {
        name: None if each is None else nn.Parameter(each.detach().to(torch.float32, copy=True))
        for name, each in base._parameters.items()
    }
    copied.__dict__.update({**base.__dict__, "_parameters": own})
    return copied
