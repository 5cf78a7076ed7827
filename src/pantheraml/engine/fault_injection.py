"""Fault injection for tests (`specs.faults`): makes a failure happen where a real one would.

A run without faults has no injector. `kill` strikes in the middle of a step's passes; other process faults come before
them; memory and numeric faults happen inside a decoder layer, through a hook that exists for that step only. Each fault
leaves a marker file in the run folder first, so it happens once, however often the run is restarted.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.modeling_layers import GradientCheckpointingLayer

from pantheraml.base.errors import ConfigError
from pantheraml.specs.faults import Fault

SLOW_SECONDS = 1.0
EXPONENT_BIT = 1 << 30
"""The highest bit of a float32's exponent: a value below 2 becomes 2**128 times as large."""

OutputFault = Callable[[Any], Any]
"""Maps the output of a layer to a faulty one."""


class InjectedError(Exception):
    """Stands for an unexpected error."""


class FaultInjector:
    def __init__(self, faults: Sequence[Fault], *, rank: int, model: nn.Module, marks: Path, hooks_work: bool) -> None:
        """`marks`: folder of the marker files. `hooks_work`: False if the model runs as a CUDA graph or compiled."""
        self._faults = [fault for fault in faults if fault.rank == rank]
        inside = [fault for fault in self._faults if fault.kind in _LAYER_FAULTS]
        if inside and not hooks_work:
            raise ConfigError(
                f"The fault {inside[0]} needs a model that runs in Python.",
                fix="Set train.cuda_graph=off and train.compile=off.",
            )
        self._model, self._marks = model, marks

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        """Wrap the passes of `step` and inject this rank's faults, unless they already happened."""
        with ExitStack() as hooks:
            for fault in self._faults:
                if fault.step == step and self._claim(fault):
                    hooks.enter_context(self._inject(fault))
            yield

    def _claim(self, fault: Fault) -> bool:
        self._marks.mkdir(exist_ok=True)
        try:
            (self._marks / str(fault).replace(":", "-")).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _inject(self, fault: Fault) -> Any:
        if fault.kind in _LAYER_FAULTS:
            return _faulty_layer_output(self._model, _LAYER_FAULTS[fault.kind])
        if fault.kind == "kill":
            return _killed_during_passes(self._model)
        if fault.kind == "raise":
            raise InjectedError(f"injected fault {fault}")
        if fault.kind == "hang":
            hang()
        time.sleep(SLOW_SECONDS)
        return nullcontext()


def hang() -> None:
    """Never return."""
    while True:
        time.sleep(1.0)


@contextmanager
def _killed_during_passes(model: nn.Module) -> Iterator[None]:
    """Kill the process when a decoder layer runs for the second time, during gradient accumulation; if none does, at
    the end of the passes."""
    seen: set[nn.Module] = set()

    def before_forward(module: nn.Module, args: Any) -> None:
        if module in seen:
            os.kill(os.getpid(), signal.SIGKILL)
        seen.add(module)

    for layer in _layers(model):
        layer.register_forward_pre_hook(before_forward)
    yield
    os.kill(os.getpid(), signal.SIGKILL)


def _layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextmanager
def _faulty_layer_output(model: nn.Module, fault: OutputFault) -> Iterator[None]:
    """Replace the output of the first decoder layer that runs on this rank, once."""
    handles: list[RemovableHandle] = []

    def after_forward(module: nn.Module, args: Any, output: Any) -> Any:
        if not handles:
            return output
        _remove(handles)
        return fault(output)

    handles += [layer.register_forward_hook(after_forward) for layer in _layers(model)]
    try:
        yield
        assert not handles, "no decoder layer ran in this step"
    finally:
        _remove(handles)


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def _raise_oom(output: Any) -> Any:
    raise torch.OutOfMemoryError("Injected fault. Tried to allocate 1.00 GiB.")


def _make_nan(output: Any) -> Any:
    hidden, rest = _hidden(output)
    faulty = hidden.clone()
    faulty.view(-1)[0] = torch.nan
    return rest(faulty)


def _flip_gradient_bit(output: Any) -> Any:
    hidden, _ = _hidden(output)
    hidden.register_hook(flip_bit)
    return output


def flip_bit(values: Tensor) -> Tensor:
    """Flip one exponent bit of the largest value, in float32 whatever the dtype."""
    flipped = values.detach().float().contiguous().clone()
    bits = flipped.view(-1).view(torch.int32)
    bits[flipped.view(-1).abs().argmax()] ^= EXPONENT_BIT
    return flipped.to(values.dtype)


def _hidden(output: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Hidden states in a layer's output, and a function that replaces them."""
    if isinstance(output, tuple):
        return output[0], lambda other: (other, *output[1:])
    return output, lambda other: other


_LAYER_FAULTS: dict[str, OutputFault] = {"oom": _raise_oom, "nan": _make_nan, "bit_flip": _flip_gradient_bit}
