"""Weights from safetensors files straight into their layers: packed, cast and placed one layer at a time.

The model is built without memory (on torch's meta device). Each tensor then goes from its file to the device; a layer
that is to be packed is packed there at once, and what it was packed from is dropped. So at no time is more in memory,
on the host or on the device, than the finished layers and a few tensors. A few threads read ahead. Where layers will be
divided among ranks, their weights can be left unread until then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from pantheraml.base import log
from pantheraml.base.errors import ModelError, UnsupportedModelError
from pantheraml.models.matching import CannotStream, match_weights
from pantheraml.models.units import Placement, make_layer, opened_files, put, read_units
from pantheraml.models.unread import in_decoder_layers, leave_unread

logger = log.get(__name__)

FP8_CAPABILITY = (9, 0)
BUFFER_BYTES = 4 << 30
"""What a model may keep besides its weights. GPT-Neo has a mask of positions x positions in every layer (128 MiB in all
of its 2.7 B version), and config.json alone says how many positions."""


def stream_model(
    source: Any, files: Sequence[Path], attention: str, place: Placement, *, layers_unread: bool = False
) -> PreTrainedModel:
    """The model that `source` (its transformers config) describes, with the weights in `files`; in evaluation mode.

    `layers_unread`: those of its decoder layers are left to `unread.read_weights`.
    """
    model = _skeleton(source, attention, place.dtype)
    with opened_files(files) as opened:
        matched = match_weights(model, opened, packing=place.packing, stored=place.stored)
        _check_stored(place)
        later = in_decoder_layers(model, matched.units) if layers_unread else []
        for unit in later:
            leave_unread(model, unit, place)
        unread = {id(unit) for unit in later}
        now = [unit for unit in matched.units if id(unit) not in unread]
        for unit, tensors in read_units(now, opened, place.device):
            if unit.replaced:
                plain = model.get_submodule(unit.module)
                model.set_submodule(unit.module, make_layer(plain, tensors, place, where=unit.module))
            else:
                _assign(model.get_submodule(unit.module), tensors)
    _fill_buffers(model)
    model.tie_weights(missing_keys=matched.missing, recompute_mapping=False)
    model._weight_conversions = []  # transformers writes the model as it was read: under the same names
    return model.to(place.device).eval()


def _skeleton(source: Any, attention: str, dtype: torch.dtype) -> Any:
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(source, dtype=dtype, attn_implementation=attention)
    # an architecture that computes with its first values while it is built
    except (NotImplementedError, RuntimeError) as err:
        raise CannotStream(f"it cannot be built without memory ({type(err).__name__})") from err
    _refuse_large_buffers(model)
    if model._get_dtype_plan(dtype):
        raise CannotStream("some of its weights stay in float32")
    return model


def check_buffers(source: Any) -> None:
    """ModelError for a model that would keep more besides its weights than BUFFER_BYTES; it is built without memory."""
    with contextlib.suppress(NotImplementedError, RuntimeError), torch.device("meta"):
        _refuse_large_buffers(AutoModelForCausalLM.from_config(source))


def _refuse_large_buffers(model: nn.Module) -> None:
    taken = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    if taken > BUFFER_BYTES:
        raise ModelError(
            f"The model would keep {taken >> 30} GiB of tables besides its weights; the most is"
            f" {BUFFER_BYTES >> 30} GiB.",
            todo="Check where the model comes from, and the positions in its config.json.",
        )


def _assign(owner: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        put(owner, name, tensor.to(getattr(owner, name).dtype))


def _check_stored(place: Placement) -> None:
    """Whether this device can work with what is stored packed; says so where weights are rounded a second time."""
    if place.stored is None:
        return
    if place.packing == "fp8" and place.device.type == "cuda":
        capability = torch.cuda.get_device_capability(place.device)
        if capability < FP8_CAPABILITY:
            raise UnsupportedModelError(
                "The model's weights are stored in fp8, which this GPU has no products for.",
                todo="Set model.precision=int8 or nf4, which packs them anew.",
            )
    if place.packing == place.stored.packing == "fp8":
        logger.info("the checkpoint's fp8 weights are scaled by row, and rounded again where they were not")
    elif place.packing not in (place.stored.packing, None):
        logger.warning("the checkpoint's %s weights are rounded again, to %s", place.stored.packing, place.packing)


def _fill_buffers(model: Any) -> None:
    """Buffers that are in no file (rotary frequencies, for one) get the values that transformers gives them.

    It computes them where it initialises a model: on the CPU, and of what is marked as initialised nothing is touched.
    A module may fill the buffers of those below it (Falcon-H1's decoder does), so it is left out only if none of them
    has an empty one. CannotStream if one is still as it was allocated after that.
    """
    empty: dict[str, Tensor] = {}
    filling: set[nn.Module] = set()
    for path, module in model.named_modules():
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if name in module._buffers and tensor.is_meta:
                empty[f"{path}.{name}".lstrip(".")] = blank = torch.empty_like(tensor, device="cpu")
                setattr(module, name, blank)
                filling.update(_with_parents(model, path))
            else:
                tensor._is_hf_initialized = True
    for module in model.modules():
        if module not in filling:
            module._is_hf_initialized = True
    written = {name: blank._version for name, blank in empty.items()}
    model.initialize_weights()
    for name, blank in empty.items():
        if model.get_buffer(name) is blank and blank._version == written[name]:
            raise CannotStream(f"nothing but its constructor fills the buffer {name}")


def _with_parents(model: nn.Module, path: str) -> list[nn.Module]:
    """The module of that name, and all that it is in."""
    parts = path.split(".") if path else []
    return [model.get_submodule(".".join(parts[:count])) for count in range(len(parts) + 1)]
