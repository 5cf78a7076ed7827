"""Makes the failures happen that a test asked for (`specs.faults`), where a real one would show.

A run without faults has no injector, and its steps do not know of any. A process is killed amid the passes of a step;
other misfortunes of processes come before them, and those of memory and numbers inside a decoder layer, by a hook that
is there for that step alone. Each leaves a mark in the run folder first, so it comes once, however often the run is
started again.
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
from pantheraml.specs.faults import Fault, check_allowed

SLOW_SECONDS = 1.0
EXPONENT_BIT = 1 << 30
"""The highest bit of a float32's exponent: a value below 2 becomes 2**128 times as large."""

Strike = Callable[[Any], Any]
"""From what a layer gave to what it is to give instead."""


class InjectedError(Exception):
    """An error that nobody foresaw, except those who asked for it."""


class FaultInjector:
    def __init__(self, faults: Sequence[str], *, rank: int, model: nn.Module, marks: Path, hooks_work: bool) -> None:
        """`marks` is the folder where faults that came are remembered. `hooks_work` is False if the model's kernels
        are replayed from a recording."""
        check_allowed(faults)
        self._faults = [fault for fault in map(Fault.parse, faults) if fault.rank == rank]
        inside = [fault for fault in self._faults if fault.kind in _IN_A_LAYER]
        if inside and not hooks_work:
            raise ConfigError(
                f"The fault {inside[0]} needs a model that runs in Python.",
                todo="Set train.cuda_graph=off and train.compile=off.",
            )
        self._model, self._marks = model, marks

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        """Around the passes of `step`: whatever is to befall this rank there, unless it already has."""
        with ExitStack() as hooks:
            for fault in self._faults:
                if fault.step == step and self._is_first(fault):
                    hooks.enter_context(self._befall(fault))
            yield

    def _is_first(self, fault: Fault) -> bool:
        self._marks.mkdir(exist_ok=True)
        try:
            (self._marks / str(fault).replace(":", "-")).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _befall(self, fault: Fault) -> Any:
        if fault.kind in _IN_A_LAYER:
            return _struck(self._model, _IN_A_LAYER[fault.kind])
        if fault.kind == "kill":
            return _killed_amid(self._model)
        if fault.kind == "raise":
            raise InjectedError(f"the fault {fault} was asked for")
        if fault.kind == "hang":
            hang()
        time.sleep(SLOW_SECONDS)
        return nullcontext()


def hang() -> None:
    """A call that never returns."""
    while True:
        time.sleep(1.0)


@contextmanager
def _killed_amid(model: nn.Module) -> Iterator[None]:
    """Where a decoder layer runs for the second time, in the midst of accumulating gradients; if none does, at the end
    of the passes."""
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
def _struck(model: nn.Module, strike: Strike) -> Iterator[None]:
    """The first decoder layer that runs, whichever this process has, gives once something else than it computed."""
    handles: list[RemovableHandle] = []

    def after_forward(module: nn.Module, args: Any, output: Any) -> Any:
        if not handles:
            return output
        _remove(handles)
        return strike(output)

    handles += [layer.register_forward_hook(after_forward) for layer in _layers(model)]
    try:
        yield
        assert not handles, "no decoder layer ran in this step"
    finally:
        _remove(handles)


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def _run_out(output: Any) -> Any:
    raise torch.OutOfMemoryError("A fault that was asked for. Tried to allocate 1.00 GiB.")


def _make_nan(output: Any) -> Any:
    hidden, rest = _hidden(output)
    broken = hidden.clone()
    broken.view(-1)[0] = torch.nan
    return rest(broken)


def _flip_in_gradient(output: Any) -> Any:
    hidden, _ = _hidden(output)
    hidden.register_hook(flip_bit)
    return output


def flip_bit(values: Tensor) -> Tensor:
    """The same, but for one bit of the largest value; in float32, whatever it was before."""
    flipped = values.detach().float().contiguous().clone()
    bits = flipped.view(-1).view(torch.int32)
    bits[flipped.view(-1).abs().argmax()] ^= EXPONENT_BIT
    return flipped.to(values.dtype)


def _hidden(output: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """The hidden states in what a layer gives, and how to put others in their place."""
    if isinstance(output, tuple):
        return output[0], lambda other: (other, *output[1:])
    return output, lambda other: other


_IN_A_LAYER: dict[str, Strike] = {"oom": _run_out, "nan": _make_nan, "bit_flip": _flip_in_gradient}
