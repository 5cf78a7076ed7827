"""Weights from safetensors files straight into their layers: packed, cast and placed one layer at a time.

The model is built without memory (on torch's meta device). Each tensor then goes from its file to the device; a layer
that is to be packed is packed there at once, and what it was packed from is dropped. So at no time is more in memory,
on the host or on the device, than the finished layers and a few tensors. A few threads read ahead.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pantheraml.base import log
from pantheraml.base.errors import UnsupportedModelError
from pantheraml.kernels.nf4 import NF4Weight
from pantheraml.models.matching import CannotStream, Unit, match_weights
from pantheraml.models.quantise.int8 import Int8Linear, Int8Weight
from pantheraml.models.quantise.nf4 import NF4Linear, plain_linear
from pantheraml.models.quantise.packed import Packing, pack_linear
from pantheraml.models.quantise.stored import StoredFormat, read_stored

logger = log.get(__name__)

READERS = 4
"""Threads that read ahead; so many layers may wait on the device as they are stored."""
FP8_CAPABILITY = (9, 0)

Target = Packing | Literal["dense"]
"""What frozen linear layers are kept in; dense: plain layers, also where the checkpoint has packed ones."""


@dataclass(frozen=True)
class Placement:
    """How the weights are to be in memory."""

    target: Target | None
    """None: as they are stored."""
    stored: StoredFormat | None
    """What the checkpoint's linear layers are packed in, if they are."""
    dtype: torch.dtype
    """Of everything that is not packed."""
    device: torch.device

    @property
    def packing(self) -> Packing | None:
        """What linear layers are packed in when they are done; None: nothing."""
        target = self.target or (self.stored.packing if self.stored else None)
        return None if target == "dense" else target


def stream_model(source: Any, files: Sequence[Path], attention: str, place: Placement) -> PreTrainedModel:
    """The model that `source` (its transformers config) describes, with the weights in `files`; in evaluation mode."""
    model = _skeleton(source, attention, place.dtype)
    with contextlib.ExitStack() as stack, torch.no_grad():
        opened = {file: stack.enter_context(safe_open(file, framework="pt")) for file in files}
        matched = match_weights(model, opened, packing=place.packing, stored=place.stored)
        _check_stored(place)
        for unit, tensors in _read(matched.units, opened, place.device):
            if unit.replaced:
                model.set_submodule(unit.module, _layer(model, unit.module, tensors, place))
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
    if model._get_dtype_plan(dtype):
        raise CannotStream("some of its weights stay in float32")
    return model


def _read(
    units: Sequence[Unit], opened: Mapping[Path, Any], device: torch.device
) -> Iterator[tuple[Unit, dict[str, Tensor]]]:
    """The units in order, each with its tensors as stored, on the device; a few are read ahead."""
    if str(device) == "cuda":  # which in a thread would mean that thread's own device
        device = torch.device("cuda", torch.cuda.current_device())

    def read(unit: Unit) -> dict[str, Tensor]:
        # what safetensors hands out is a view of the mapped file: it goes to a GPU without a copy on the host, and on
        # the CPU it is copied, since the file may change
        return {part: opened[file].get_tensor(key).to(device, copy=True) for part, (file, key) in unit.parts.items()}

    waiting = iter(units)
    with ThreadPoolExecutor(READERS, thread_name_prefix="read-weights") as pool:
        ahead: deque[tuple[Unit, Future[dict[str, Tensor]]]] = deque(
            (unit, pool.submit(read, unit)) for unit in itertools.islice(waiting, READERS)
        )
        while ahead:
            unit, reading = ahead.popleft()
            tensors = reading.result()
            del reading
            yield unit, tensors
            del tensors  # before the next one is read
            ahead.extend((unit, pool.submit(read, unit)) for unit in itertools.islice(waiting, 1))


def _assign(owner: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        value = tensor.to(getattr(owner, name).dtype)
        setattr(owner, name, value if name in owner._buffers else nn.Parameter(value, value.is_floating_point()))


def _layer(model: Any, name: str, tensors: Mapping[str, Tensor], place: Placement) -> nn.Module:
    """The layer that stands in for the plain one of that name."""
    plain = model.get_submodule(name)
    transposed = isinstance(plain, Conv1D)
    bias = tensors.get("bias")
    if bias is not None:
        bias = bias.to(place.dtype)
    weight: NF4Weight | Int8Weight | Tensor
    if place.stored is None:
        weight = tensors["weight"].T if transposed else tensors["weight"]
    elif type(plain) is nn.Linear:
        weight = read_stored(place.stored, tensors, plain.weight.shape, where=name)
    else:
        raise UnsupportedModelError(f"A packed {type(plain).__name__} is not read.", where=name)
    if place.packing == "nf4" and isinstance(weight, NF4Weight):
        return NF4Linear(weight, bias)
    if place.packing == "int8" and isinstance(weight, Int8Weight):
        return Int8Linear(weight, bias)
    dense = weight if isinstance(weight, Tensor) else weight.dequantise(torch.float32)
    if place.packing is None:
        return plain_linear(dense.to(place.dtype), bias, from_conv1d=transposed)
    by_row = place.stored is not None and place.stored.packing == "fp8"
    return pack_linear(place.packing, dense, bias, from_conv1d=transposed, by_row=by_row)


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
    """
    for module in model.modules():
        empty = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        for name in empty:
            setattr(module, name, torch.empty_like(module.get_buffer(name), device="cpu"))
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if name not in empty:
                tensor._is_hf_initialized = True
        if not empty:
            module._is_hf_initialized = True
    model.initialize_weights()
