"""Reading the weights of a model in units: one tensor, or all of a layer that is packed as it is read."""

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

from pantheraml.base.errors import UnsupportedModelError
from pantheraml.kernels.nf4 import NF4Weight
from pantheraml.models.matching import Unit
from pantheraml.models.quantise.int8 import Int8Linear, Int8Weight
from pantheraml.models.quantise.nf4 import NF4Linear, plain_linear
from pantheraml.models.quantise.packed import Packing, pack_linear
from pantheraml.models.quantise.stored import StoredFormat, read_stored

READERS = 4
"""Threads that read ahead; so many layers may wait on the device as they are stored."""

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


@contextlib.contextmanager
def opened_files(files: Iterable[Path]) -> Iterator[dict[Path, Any]]:
    """Safetensors files to read from, without gradients."""
    with contextlib.ExitStack() as stack, torch.no_grad():
        yield {file: stack.enter_context(safe_open(file, framework="pt")) for file in files}


def read_units(
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


def put(owner: nn.Module, name: str, value: Tensor) -> None:
    """Make `value` the weight of that name."""
    setattr(owner, name, value if name in owner._buffers else nn.Parameter(value, value.is_floating_point()))


def make_layer(plain: Any, tensors: Mapping[str, Tensor], place: Placement, *, where: str) -> nn.Module:
    """The layer that is to be in the place of the plain one."""
    transposed = isinstance(plain, Conv1D)
    bias = tensors.get("bias")
    if bias is not None:
        bias = bias.to(place.dtype)
    weight: NF4Weight | Int8Weight | Tensor
    if place.stored is None:
        weight = tensors["weight"].T if transposed else tensors["weight"]
    elif type(plain) is nn.Linear:
        weight = read_stored(place.stored, tensors, plain.weight.shape, where=where)
    else:
        raise UnsupportedModelError(f"A packed {type(plain).__name__} is not read.", where=where)
    if place.packing == "nf4" and isinstance(weight, NF4Weight):
        return NF4Linear(weight, bias)
    if place.packing == "int8" and isinstance(weight, Int8Weight):
        return Int8Linear(weight, bias)
    dense = weight if isinstance(weight, Tensor) else weight.dequantise(torch.float32)
    if place.packing is None:
        return plain_linear(dense.to(place.dtype), bias, from_conv1d=transposed)
    by_row = place.stored is not None and place.stored.packing == "fp8"
    return pack_linear(place.packing, dense, bias, from_conv1d=transposed, by_row=by_row)
