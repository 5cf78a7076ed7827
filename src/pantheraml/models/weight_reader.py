"""Read the weights of a model in units: one tensor, or a whole layer that is quantized as it is read."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pantheraml.base.errors import ModelError, UnsupportedModelError
from pantheraml.kernels.nf4.format import NF4Weight
from pantheraml.models.checkpoint_mapping import WeightUnit
from pantheraml.models.quantize.checkpoint_formats import MXFP4_PARTS, CheckpointFormat, read_quantized_weight
from pantheraml.models.quantize.int8 import Int8Linear, Int8Weight
from pantheraml.models.quantize.mxfp4 import dequantize_mxfp4
from pantheraml.models.quantize.nf4 import NF4Linear, plain_linear
from pantheraml.models.quantize.quantized_linear import QuantFormat, quantize_linear

READERS = 4
"""Prefetch threads; also the number of layers that may wait on the device in checkpoint form."""

WeightFormat = QuantFormat | Literal["dense"]
"""Format of frozen linear layers in memory; dense: plain layers, even if the checkpoint is quantized."""


@dataclass(frozen=True)
class WeightPlacement:
    """Format, dtype and device of the loaded weights."""

    target: WeightFormat | None
    """None: as in the checkpoint."""
    checkpoint_format: CheckpointFormat | None
    """Quantization of the checkpoint's linear layers, if any."""
    dtype: torch.dtype
    """Of everything that is not quantized."""
    device: torch.device

    @property
    def quant_format(self) -> QuantFormat | None:
        """Format of the linear layers once loaded; None: not quantized."""
        target = self.target or (self.checkpoint_format.linear_format if self.checkpoint_format else None)
        return None if target == "dense" else target


@contextlib.contextmanager
def open_safetensors(files: Iterable[Path]) -> Iterator[dict[Path, Any]]:
    """Open safetensors files for reading, under no_grad."""
    with contextlib.ExitStack() as stack, torch.no_grad():
        yield {file: stack.enter_context(safe_open(file, framework="pt")) for file in files}


def read_units(
    units: Sequence[WeightUnit], opened: Mapping[Path, Any], device: torch.device
) -> Iterator[tuple[WeightUnit, dict[str, Tensor]]]:
    """Yield the units in order, each with its checkpoint tensors on the device; a few are prefetched."""
    if str(device) == "cuda":  # in another thread this would mean that thread's current device
        device = torch.device("cuda", torch.cuda.current_device())

    def read(unit: WeightUnit) -> dict[str, Tensor]:
        # safetensors returns a view of the mmapped file: it goes to a GPU without a host copy; on the CPU it is copied,
        # since the file may change.
        parts = {part: opened[file].get_tensor(key).to(device, copy=True) for part, (file, key) in unit.parts.items()}
        return parts if unit.packed is None else {unit.packed: _unpack(parts, f"{unit.module}.{unit.packed}")}

    remaining = iter(units)
    with ThreadPoolExecutor(READERS, thread_name_prefix="read-weights") as pool:
        prefetched: deque[tuple[WeightUnit, Future[dict[str, Tensor]]]] = deque(
            (unit, pool.submit(read, unit)) for unit in itertools.islice(remaining, READERS)
        )
        while prefetched:
            unit, future = prefetched.popleft()
            tensors = future.result()
            del future
            yield unit, tensors
            del tensors  # free them before the next read
            prefetched.extend((unit, pool.submit(read, unit)) for unit in itertools.islice(remaining, 1))


def _unpack(parts: Mapping[str, Tensor], where: str) -> Tensor:
    missing = [part for part in MXFP4_PARTS if part not in parts]
    if missing:
        raise ModelError(f"An mxfp4 weight has no {missing[0]}.", where=where, fix="Download the model again.")
    return dequantize_mxfp4(*(parts[part] for part in MXFP4_PARTS), where=where)


def set_weight(owner: nn.Module, name: str, value: Tensor) -> None:
    """Set the parameter or buffer `name` of `owner`."""
    setattr(owner, name, value if name in owner._buffers else nn.Parameter(value, value.is_floating_point()))


def build_layer(plain: Any, tensors: Mapping[str, Tensor], place: WeightPlacement, *, where: str) -> nn.Module:
    """Build the layer that replaces `plain`, from its checkpoint tensors."""
    transposed = isinstance(plain, Conv1D)
    bias = tensors.get("bias")
    if bias is not None:
        bias = bias.to(place.dtype)
    weight: NF4Weight | Int8Weight | Tensor
    if place.checkpoint_format is None or place.checkpoint_format.linear_format is None:
        weight = tensors["weight"].T if transposed else tensors["weight"]
    elif type(plain) is nn.Linear:
        weight = read_quantized_weight(place.checkpoint_format, tensors, plain.weight.shape, where=where)
    else:
        raise UnsupportedModelError(
            f"A quantized {type(plain).__name__} is not supported.", where=where, fix="Use the unquantized model."
        )
    if place.quant_format == "nf4" and isinstance(weight, NF4Weight):
        return NF4Linear(weight, bias)
    if place.quant_format == "int8" and isinstance(weight, Int8Weight):
        return Int8Linear(weight, bias)
    dense = weight if isinstance(weight, Tensor) else weight.dequantize(torch.float32)
    if place.quant_format is None:
        return plain_linear(dense.to(place.dtype), bias, from_conv1d=transposed)
    by_row = place.checkpoint_format is not None and place.checkpoint_format.quant_format == "fp8"
    return quantize_linear(place.quant_format, dense, bias, from_conv1d=transposed, by_row=by_row)
