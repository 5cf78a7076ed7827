"""Common interface of the quantized linear layers, and quantizing the linear layers of a model."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pantheraml.base import log
from pantheraml.models.model_kind import classifier_head, inside, vision_parts
from pantheraml.models.quantize.direct_weights import directly_read
from pantheraml.models.quantize.fp8 import FP8Linear, FP8LoraLinear
from pantheraml.models.quantize.int8 import Int8Linear, Int8LoraLinear
from pantheraml.models.quantize.nf4 import NF4Linear, NF4LoraLinear
from pantheraml.models.quantize.quantized_lora import QuantizedLoraLinear

logger = log.get(__name__)

QuantFormat = Literal["fp8", "int8", "nf4"]
"""Formats that frozen weights can be quantized to."""
QuantizedLinear = FP8Linear | Int8Linear | NF4Linear
LORA_LAYERS: dict[type[nn.Module], type[QuantizedLoraLinear]] = {
    FP8Linear: FP8LoraLinear,
    Int8Linear: Int8LoraLinear,
    NF4Linear: NF4LoraLinear,
}
"""PEFT's LoRA layer for each quantized layer."""


def quantize_linear(
    quant_format: QuantFormat, weight: Tensor, bias: Tensor | None, *, from_conv1d: bool = False, by_row: bool = False
) -> QuantizedLinear:
    """Quantize a dense `weight` (out_features, in_features) on its own device.

    `by_row`: the weight was dequantized from fp8 with row scales, and requantizing with row scales restores its values.
    """
    match quant_format:
        case "fp8":
            return FP8Linear(weight, bias, scales="rows" if by_row else None)
        case "int8":
            return Int8Linear(weight, bias, from_conv1d=from_conv1d)
        case "nf4":
            return NF4Linear(weight, bias, from_conv1d=from_conv1d)


def quantizable_linears(model: Any, quant_format: QuantFormat) -> list[str]:
    """Return the names of the linear layers to quantize: all but the output head (or a classifier's), those that see
    images, those whose weight the model's own code reads, and Conv1D in fp8."""
    head = model.get_output_embeddings()
    kinds = {nn.Linear} if quant_format == "fp8" else {nn.Linear, Conv1D}
    names = [name for name, layer in model.named_modules() if type(layer) in kinds and layer is not head]
    scoring = inside(classifier_head(model), model)
    names = [name for name in names if name not in scoring]
    visual = inside(vision_parts(model), model).intersection(names)
    if visual:
        logger.info("%d linear layers of the vision tower are not quantized: they keep the compute dtype", len(visual))
    names = [name for name in names if name not in visual]
    kept = directly_read(model).intersection(names)
    if kept:
        last = ", ".join(sorted({name.rpartition(".")[2] for name in kept}))
        logger.info("%d layers (%s) are not quantized: the model's own code reads their weight", len(kept), last)
    return [name for name in names if name not in kept]


def quantize_linears(model: Any, quant_format: QuantFormat, *, dtype: torch.dtype, device: torch.device) -> int:
    """Quantize the linear layers of a loaded model one by one on `device`, with biases in `dtype`; return how many."""
    names = quantizable_linears(model, quant_format)
    for name in names:
        layer = model.get_submodule(name)
        from_conv1d = isinstance(layer, Conv1D)
        weight = layer.weight.detach().to(device)
        bias = None if layer.bias is None else layer.bias.detach().to(device, dtype)
        quantized = quantize_linear(quant_format, weight.T if from_conv1d else weight, bias, from_conv1d=from_conv1d)
        model.set_submodule(name, quantized)
    set_dense_dtype(model, dtype)
    return len(names)


def set_dense_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Set the dtype that quantized layers dequantize to: the compute dtype of the rest of the model."""
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            layer.dense_dtype = dtype


def dequantize_linears(model: nn.Module, dtype: torch.dtype) -> int:
    """Replace quantized layers by plain ones with the dequantized weights; return how many."""
    names = [name for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)]
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, QuantizedLinear)
        model.set_submodule(name, layer.to_linear(dtype))
    return len(names)


def plain_state(model: Any) -> dict[str, Tensor]:
    """Return `model.state_dict()` with quantized layers dequantized and every tensor contiguous.

    Tensors that differ from the model's own are copies in host memory.
    """
    state: dict[str, Tensor] = model.state_dict()
    head = model.get_output_embeddings()
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            for buffer, _ in layer.named_buffers(recurse=False):
                state.pop(f"{name}.{buffer}", None)
            if layer is head and model.config.get_text_config().tie_word_embeddings:
                continue  # saved as the embedding
            plain = layer.to_linear(layer.dense_dtype)
            state |= {f"{name}.{key}": value.detach().cpu() for key, value in plain.named_parameters()}
    return {name: tensor if tensor.is_contiguous() else tensor.cpu().contiguous() for name, tensor in state.items()}


def quant_formats_of(model: nn.Module) -> list[str]:
    """Return the names of the quantization formats in `model`."""
    kinds = {FP8Linear: "fp8", Int8Linear: "int8", NF4Linear: "nf4"}
    return sorted({name for layer in model.modules() for kind, name in kinds.items() if isinstance(layer, kind)})


def constant_buffers(model: nn.Module) -> list[str]:
    """Return the full names of buffers that never change and are identical on all ranks.

    These are quantized weights and non-persistent buffers computed from the config (RoPE frequencies).
    """
    computed = [
        f"{name}.{buffer}" if name else buffer
        for name, module in model.named_modules()
        for buffer in module._non_persistent_buffers_set
        if getattr(module, buffer) is not None
    ]
    return sorted({*quantized_buffers(model), *computed})


def quantized_buffers(model: nn.Module) -> list[str]:
    """Return the full names of quantized weights. They never change, so DDP must not broadcast them every step."""
    return [
        f"{name}.{buffer}"
        for name, layer in model.named_modules()
        if isinstance(layer, QuantizedLinear)
        for buffer, _ in layer.named_buffers(recurse=False)
    ]
