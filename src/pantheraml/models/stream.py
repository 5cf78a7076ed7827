"""Stream weights from safetensors files into their layers: quantize, cast and place one layer at a time.

The model is built on the meta device. Each tensor then goes from its file to the device; a layer to be quantized is
quantized there at once, and its source is dropped. So neither host nor device ever holds more than the finished layers
and a few tensors. A few threads prefetch. Layers that will be sharded over ranks can be left unread until then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pantheraml.base import log
from pantheraml.base.errors import ModelError, UnsupportedModelError
from pantheraml.models.checkpoint_mapping import CannotStream, match_weights
from pantheraml.models.lazy_weights import defer_weights, in_decoder_layers
from pantheraml.models.model_kind import TEXT, Attention, ModelKind
from pantheraml.models.weight_reader import WeightPlacement, build_layer, open_safetensors, read_units, set_weight
from pantheraml.planner.precision import why_no_fp8

logger = log.get(__name__)

BUFFER_BYTES = 4 << 30
"""Limit on a model's buffers. GPT-Neo has a mask of positions x positions in every layer (128 MiB in total for the 2.7B
model), and the number of positions comes from config.json alone."""


def stream_model(
    source: Any,
    files: Sequence[Path],
    attention: Attention,
    place: WeightPlacement,
    *,
    lazy_layers: bool = False,
    kind: ModelKind = TEXT,
) -> PreTrainedModel:
    """Build the model that `source` (its transformers config) describes, with the weights in `files`, in eval mode.

    `lazy_layers`: decoder layers are left for `lazy_weights.materialize`.
    """
    model = _meta_model(source, attention, place.dtype, kind)
    with open_safetensors(files) as opened:
        mapping = match_weights(
            model, opened, quant_format=place.quant_format, checkpoint_format=place.checkpoint_format
        )
        _check_requantization(place)
        deferred = in_decoder_layers(model, mapping.units) if lazy_layers else []
        for unit in deferred:
            defer_weights(model, unit, place)
        deferred_ids = {id(unit) for unit in deferred}
        eager = [unit for unit in mapping.units if id(unit) not in deferred_ids]
        for unit, tensors in read_units(eager, opened, place.device):
            if unit.replaced:
                plain = model.get_submodule(unit.module)
                model.set_submodule(unit.module, build_layer(plain, tensors, place, where=unit.module))
            else:
                _assign(model.get_submodule(unit.module), tensors)
    _fill(model, mapping.new)
    model.new_weights = mapping.new
    model.tie_weights(missing_keys=mapping.missing, recompute_mapping=False)
    model._weight_conversions = mapping.renamings  # transformers saves under the names that were read
    return model.to(place.device).eval()


def _meta_model(source: Any, attention: Attention, dtype: torch.dtype, kind: ModelKind) -> Any:
    try:
        with torch.device("meta"):
            model = kind.auto_model.from_config(source, dtype=dtype, attn_implementation=attention)
    # an architecture that computes with its initial values in its constructor
    except (NotImplementedError, RuntimeError) as err:
        raise CannotStream(f"it cannot be built on the meta device ({type(err).__name__})") from err
    _reject_large_buffers(model)
    if model._get_dtype_plan(dtype):
        raise CannotStream("some of its weights must stay in float32")
    return model


def check_buffers(source: Any, kind: ModelKind = TEXT) -> None:
    """ModelError if the model's buffers would take more than BUFFER_BYTES; it is built on the meta device."""
    with contextlib.suppress(NotImplementedError, RuntimeError), torch.device("meta"):
        _reject_large_buffers(kind.auto_model.from_config(source))


def _reject_large_buffers(model: nn.Module) -> None:
    taken = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    if taken > BUFFER_BYTES:
        raise ModelError(
            f"The model's buffers (masks, position tables) would take {taken >> 30} GiB, above the limit of"
            f" {BUFFER_BYTES >> 30} GiB.",
            fix="Check the source of the model, and the number of positions in its config.json.",
        )


def _assign(owner: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        set_weight(owner, name, tensor.to(getattr(owner, name).dtype))


def _check_requantization(place: WeightPlacement) -> None:
    """Check that the device supports the checkpoint's format, and log where weights are quantized a second time."""
    if place.checkpoint_format is None:
        return
    if place.checkpoint_format.linear_format is None:
        logger.info("the checkpoint's %s experts are dequantized", place.checkpoint_format.quant_format)
        return
    gpus = [torch.cuda.get_device_capability(place.device)] if place.device.type == "cuda" else []
    if place.quant_format == "fp8" and why_no_fp8(gpus) is not None:
        raise UnsupportedModelError(
            "The checkpoint is quantized in fp8, and this GPU has no fp8 matmuls.",
            fix="Set model.precision=int8 or nf4 to requantize them.",
        )
    if place.quant_format == place.checkpoint_format.quant_format == "fp8":
        logger.info("the checkpoint's fp8 weights get row scales, and are rounded again where they had none")
    elif place.quant_format not in (place.checkpoint_format.quant_format, None):
        logger.warning(
            "the checkpoint's %s weights are requantized to %s",
            place.checkpoint_format.quant_format,
            place.quant_format,
        )


def _fill(model: Any, new: Collection[str]) -> None:
    """Fill buffers that are in no file (such as RoPE frequencies), and the weights `new`, with the values that
    transformers gives them.

    transformers computes them in `initialize_weights`, on the CPU, and skips whatever is marked as initialized. A
    module may fill the buffers of its submodules (Falcon-H1's decoder does), so a module is skipped only if none of its
    submodules has an empty buffer. CannotStream if a buffer is still unwritten afterwards.
    """
    empty: dict[str, Tensor] = {}
    filling: set[nn.Module] = set()
    for path, module in model.named_modules():
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            full = f"{path}.{name}".lstrip(".")
            if tensor.is_meta and (name in module._buffers or full in new):
                set_weight(module, name, torch.empty_like(tensor, device="cpu"))
                empty[full] = getattr(module, name)
                filling.update(_with_parents(model, path))
            else:
                tensor._is_hf_initialized = True
    for module in model.modules():
        if module not in filling:
            module._is_hf_initialized = True
    written = {name: blank._version for name, blank in empty.items()}
    model.initialize_weights()
    for name, blank in empty.items():
        owner, _, own = name.rpartition(".")
        if getattr(model.get_submodule(owner), own) is blank and blank._version == written[name]:
            raise CannotStream(f"only its constructor fills {name}")


def _with_parents(model: nn.Module, path: str) -> list[nn.Module]:
    """Return the module at `path` and all its ancestors."""
    parts = path.split(".") if path else []
    return [model.get_submodule(".".join(parts[:count])) for count in range(len(parts) + 1)]
