"""Losses and metrics that the host can read without waiting for what was queued after them.

Trainers ask after the backward pass whether the loss is NaN. A GPU answers in order: the host waits until the gradients
are done, and then the GPU waits while the host clips them, steps, logs and loads. But the loss was known before the
backward pass began. So its value is sent to the host as soon as it is computed, and questions about it are answered
from there. Nothing else changes: it is a tensor on its device, with its gradient.

Metrics, which have no gradient, are sent as they are, token by token, and what a trainer makes of them is computed
twice: by the GPU in its turn, and by the host if it asks. (A sum of the host's may differ in its last digit.) Labels
and masks came from the host, which need not ask for them at all if it remembers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only


def copy_ahead(tensor: Tensor) -> Callable[[], Tensor]:
    """Sends `tensor` to the host; the answer gives it there, and waits for it, but for nothing that is queued later."""
    copy = tensor.detach().to("cpu", non_blocking=True, copy=True)
    if not tensor.is_cuda:
        return lambda: copy
    there = torch.cuda.Event()
    there.record(torch.cuda.current_stream(tensor.device))

    def read() -> Tensor:
        there.synchronize()
        return copy

    return read


class ReadAhead(Tensor):
    """What is computed from one, as far as it has a gradient, is one too, and each scalar among them is sent ahead."""

    _sent: Callable[[], Tensor] | None = None
    _sent_version: int = 0
    """Its version then. Another one now: it was changed in place, by whatever name, and what was sent is old."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Collection[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if not all(issubclass(cls, kind) for kind in types):  # other kinds of tensors know plain ones and their own
            args, named = tree_map_only(cls, _plain, (args, named))
            return func(*args, **named)
        with torch._C.DisableTorchFunctionSubclass():
            if torch.compiler.is_compiling():
                return func(*args, **named)
            if not args or not isinstance(args[0], cls):
                result = func(*args, **named)
                return result if _is_older(result, func, args, named) else _sent_ahead(result)
            first, others = args[0], args[1:]
            if func == _DATA and remembered(first) is not None:
                first._sent = None  # what is done to that raises no version
            read = _reader(first)
            if func in _READINGS:
                return func(read() if read is not None else _plain(first), *others, **named)
            if func in _KEEPINGS:
                return func(_plain(first), *others, **named)
            result = func(*args, **named)
            if _is_older(result, func, args, named):
                return result
            if read is not None and func in _SAME_VALUE:
                return _known(result, read)
            if read is not None and (func in _QUESTIONS or (func in _SCALINGS and _is_exact(others, named))):
                return _known(result, lambda: func(read(), *others))
            if read is not None and func in _OF_METRICS and not result.requires_grad and not named:
                return _known_metric(result, func, read, others)
            return _sent_ahead(result)


_READINGS = {Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__format__, Tensor.item, Tensor.tolist}
_KEEPINGS = {Tensor.__repr__, Tensor.__reduce_ex__, Tensor.__deepcopy__}
"""Where the value is written down or copied, nobody needs to know that it had been sent ahead."""
_DATA = cast(Any, Tensor.data).__get__
_SAME_VALUE = {Tensor.detach, torch.detach}
_SCALINGS = {Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__, Tensor.mul, Tensor.div, torch.mul, torch.div}
_OF_METRICS = _SCALINGS | {Tensor.sum, torch.sum, Tensor.mean, torch.mean, Tensor.__gt__, Tensor.gt, torch.gt}
_QUESTIONS = {torch.isnan, torch.isinf, torch.isfinite, Tensor.isnan, Tensor.isinf, Tensor.isfinite}


def _known_metric(result: Tensor, func: Any, read: Callable[[], Tensor], others: tuple[Any, ...]) -> Tensor:
    """By the host as well, if it knows all of the operands."""
    reads = [_reader(each) if isinstance(each, Tensor) else None for each in others]
    if any(isinstance(each, Tensor) and ask is None for each, ask in zip(others, reads, strict=True)):
        return result
    depth = 1 + max(getattr(ask, "depth", 0) for ask in (read, *reads))
    if depth > _DEEPEST:
        return result

    def compute() -> Tensor:
        there = [each if ask is None else ask() for each, ask in zip(others, reads, strict=True)]
        return cast(Tensor, func(read(), *there))

    return _known(result, _Once(compute, depth))


_DEEPEST = 16
"""Operations that are still to be done by the host when it asks for the last one's result."""


class _Once:
    """What is read twice is computed once, and what it was computed from is not kept."""

    def __init__(self, compute: Callable[[], Tensor], depth: int) -> None:
        self._compute: Callable[[], Tensor] | None = compute
        self._result: Tensor | None = None
        self.depth = depth

    def __call__(self) -> Tensor:
        if self._compute is not None:
            self._result, self._compute, self.depth = self._compute(), None, 0
        assert self._result is not None
        return self._result


def _plain(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def _reader(tensor: Tensor) -> Callable[[], Tensor] | None:
    """How to get what was sent, unless that is old."""
    if not isinstance(tensor, ReadAhead) or tensor._sent_version != tensor._version:
        return None
    return tensor._sent


def _is_older(result: Any, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether somebody had this tensor before, and it is none of ours: a parameter that took a loss in, say."""
    if type(result) is ReadAhead:
        return False
    return getattr(func, "__name__", None) == "__get__" or any(result is each for each in (*args, *named.values()))


def _is_exact(others: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether scaling by that gives the same on the host, to the last bit: by a power of two, as is the 1 of trainers
    with one process that add up nothing."""
    if len(others) != 1 or named or type(others[0]) not in (int, float):
        return False
    return math.isfinite(others[0]) and math.frexp(others[0])[0] == 0.5


def read_ahead(tensor: Tensor) -> Tensor:
    """`tensor`, such that the loss that a trainer makes of it can be read early.

    As it is, where several processes work together: collectives change tensors in place, and no version tells."""
    if not _is_alone():
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return _sent_ahead(tensor)


def metrics_ahead(*tensors: Tensor) -> None:
    """What a trainer makes of these, which have no gradient, can be read early, as they are now. They are sent whole,
    so let them be small: some numbers for each token."""
    if _is_alone():
        for tensor in tensors:
            if type(tensor) in (Tensor, ReadAhead) and not tensor.requires_grad:
                _known(tensor, copy_ahead(tensor))


class _Remembered:
    """Whoever sent a tensor to its device still has it."""

    def __init__(self, host: Tensor) -> None:
        self._host = host

    def __call__(self) -> Tensor:
        return self._host


def came_from(host: Tensor, tensor: Tensor) -> None:
    """`tensor` is a copy of `host` on another device, which need not be asked for what the host had."""
    if _is_alone() and type(tensor) is Tensor and not tensor.requires_grad:
        _known(tensor, _Remembered(host))


def remembered(tensor: Tensor) -> Tensor | None:
    """What `tensor` is a copy of, to be looked at only; None if it did not come from the host, or was changed."""
    read = _reader(tensor)
    return read() if isinstance(read, _Remembered) else None


def on_host(tensor: Tensor) -> Tensor:
    """The values of `tensor`, to be looked at only. Waits for the device unless they are remembered."""
    known = remembered(tensor)
    return tensor.cpu() if known is None else known


def _is_alone() -> bool:
    return not torch.compiler.is_compiling() and not (dist.is_initialized() and dist.get_world_size() > 1)


def _sent_ahead(result: Any) -> Any:
    if type(result) not in (Tensor, ReadAhead) or not result.requires_grad:
        return result
    return _known(result, copy_ahead(result)) if result.ndim == 0 else _marked(result)


def _known(result: Tensor, read: Callable[[], Tensor]) -> Tensor:
    if result.is_inference():  # which has no version
        return result
    known = _marked(result)
    known._sent, known._sent_version = read, known._version
    return known


def _marked(result: Tensor) -> ReadAhead:
    """The same tensor: `as_subclass` would make another, which autograd would have to pass through on its way back."""
    result.__class__ = ReadAhead
    return cast(ReadAhead, result)
