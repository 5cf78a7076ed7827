"""What all packed layers have in common, and turning a model's plain linear layers into them."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pantheraml.models.quantise.fp8 import FP8Linear, FP8LoraLinear
from pantheraml.models.quantise.int8 import Int8Linear, Int8LoraLinear
from pantheraml.models.quantise.lora import PackedLoraLinear
from pantheraml.models.quantise.nf4 import NF4Linear, NF4LoraLinear

Packing = Literal["fp8", "int8", "nf4"]
"""What frozen weights can be packed in."""
PackedLinear = FP8Linear | Int8Linear | NF4Linear
LORA_LAYERS: dict[type[nn.Module], type[PackedLoraLinear]] = {
    FP8Linear: FP8LoraLinear,
    Int8Linear: Int8LoraLinear,
    NF4Linear: NF4LoraLinear,
}
"""PEFT's layer over each packed layer."""


def pack_linear(
    packing: Packing, weight: Tensor, bias: Tensor | None, *, from_conv1d: bool = False, by_row: bool = False
) -> PackedLinear:
    """`weight` is (out_features, in_features), dense, on the device where the layer is to be. `by_row`: it comes from
    fp8 with a scale for each row, and such scales give the same values again."""
    match packing:
        case "fp8":
            return FP8Linear(weight, bias, scales="rows" if by_row else None)
        case "int8":
            return Int8Linear(weight, bias, from_conv1d=from_conv1d)
        case "nf4":
            return NF4Linear(weight, bias, from_conv1d=from_conv1d)


def packable_layers(model: Any, packing: Packing) -> list[str]:
    """Names of the linear layers that are packed: all but the output head, and in fp8 no Conv1D."""
    head = model.get_output_embeddings()
    kinds = {nn.Linear} if packing == "fp8" else {nn.Linear, Conv1D}
    return [name for name, layer in model.named_modules() if type(layer) in kinds and layer is not head]


def pack_linears(model: Any, packing: Packing, *, dtype: torch.dtype, device: torch.device) -> int:
    """Packs the linear layers of a loaded model one by one on `device`, biases in `dtype`; how many there were."""
    names = packable_layers(model, packing)
    for name in names:
        layer = model.get_submodule(name)
        from_conv1d = isinstance(layer, Conv1D)
        weight = layer.weight.detach().to(device)
        bias = None if layer.bias is None else layer.bias.detach().to(device, dtype)
        packed = pack_linear(packing, weight.T if from_conv1d else weight, bias, from_conv1d=from_conv1d)
        model.set_submodule(name, packed)
    set_dense_dtype(model, dtype)
    return len(names)


def set_dense_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """What packed layers become when they are unpacked: what the rest of the model computes in."""
    for layer in model.modules():
        if isinstance(layer, PackedLinear):
            layer.dense_dtype = dtype


def unpack_linears(model: nn.Module, dtype: torch.dtype) -> int:
    """The way back, as far as there is one: plain layers with the weights that packing left. How many there were."""
    names = [name for name, layer in model.named_modules() if isinstance(layer, PackedLinear)]
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, PackedLinear)
        model.set_submodule(name, layer.to_linear(dtype))
    return len(names)


def plain_state(model: Any) -> dict[str, Tensor]:
    """What `model.state_dict()` would be with plain layers in the place of packed ones, each tensor in a piece of its
    own; those that are not so in the model are copies in host memory."""
    state: dict[str, Tensor] = model.state_dict()
    head = model.get_output_embeddings()
    for name, layer in model.named_modules():
        if isinstance(layer, PackedLinear):
            for buffer, _ in layer.named_buffers(recurse=False):
                state.pop(f"{name}.{buffer}", None)
            if layer is head and model.config.get_text_config().tie_word_embeddings:
                continue  # the file has it as the embedding
            plain = layer.to_linear(layer.dense_dtype)
            state |= {f"{name}.{key}": value.detach().cpu() for key, value in plain.named_parameters()}
    return {name: tensor if tensor.is_contiguous() else tensor.cpu().contiguous() for name, tensor in state.items()}


def packed_in(model: nn.Module) -> list[str]:
    """In what weights of `model` are packed, by name."""
    kinds = {FP8Linear: "fp8", Int8Linear: "int8", NF4Linear: "nf4"}
    return sorted({kinds[type(layer)] for layer in model.modules() if isinstance(layer, PackedLinear)})


def constant_buffers(model: nn.Module) -> list[str]:
    """Full names of buffers that no step changes and all ranks make alike: packed weights, and what is computed from
    the config and never saved (rotary frequencies)."""
    computed = [
        f"{name}.{buffer}" if name else buffer
        for name, module in model.named_modules()
        for buffer in module._non_persistent_buffers_set
        if getattr(module, buffer) is not None
    ]
    return sorted({*packed_buffers(model), *computed})


def packed_buffers(model: nn.Module) -> list[str]:
    """Full names of the packed weights. No rank changes them on its own, so DDP must not send them at every step."""
    return [
        f"{name}.{buffer}"
        for name, layer in model.named_modules()
        if isinstance(layer, PackedLinear)
        for buffer, _ in layer.named_buffers(recurse=False)
    ]
