"""A loss that the host can read without waiting for what was queued after it.

Trainers ask after the backward pass whether the loss is NaN. A GPU answers in order: the host waits until the gradients
are done, and then the GPU waits while the host clips them, steps, logs and loads. But the loss was known before the
backward pass began. So its value is sent to the host as soon as it is computed, and questions about it are answered
from there. Nothing else changes: it is a tensor on its device, with its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


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
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented
        named = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if not args or not isinstance(args[0], cls):
                result = func(*args, **named)
                return result if _is_older(result, func, args, named) else _sent_ahead(result)
            first, others = args[0], args[1:]
            read = first._sent if first._sent_version == first._version else None
            if func in _READINGS:
                return func(read() if read is not None else first.as_subclass(Tensor), *others, **named)
            if func in _KEEPINGS:
                return func(first.as_subclass(Tensor), *others, **named)
            result = func(*args, **named)
            if _is_older(result, func, args, named):
                return result
            if read is not None and func in _SAME_VALUE:
                return _known(result, read)
            if read is not None and (func in _QUESTIONS or (func in _SCALINGS and _is_exact(others, named))):
                return _known(result, lambda: func(read(), *others))
            return _sent_ahead(result)


_READINGS = {Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__format__, Tensor.item, Tensor.tolist}
_KEEPINGS = {Tensor.__repr__, Tensor.__reduce_ex__, Tensor.__deepcopy__}
"""Where the value is written down or copied, nobody needs to know that it had been sent ahead."""
_SAME_VALUE = {Tensor.detach, torch.detach}
_SCALINGS = {Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__, Tensor.mul, Tensor.div, torch.mul, torch.div}
_QUESTIONS = {torch.isnan, torch.isinf, torch.isfinite, Tensor.isnan, Tensor.isinf, Tensor.isfinite}


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
    if torch.compiler.is_compiling() or (dist.is_initialized() and dist.get_world_size() > 1):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return _sent_ahead(tensor)


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
