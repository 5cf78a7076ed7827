"""Losses and metrics that the host can read without waiting for later GPU work.

After the backward, trainers check the loss for NaN. A GPU executes in order, so the host waits until the gradients are
done, and then the GPU idles while the host clips, steps, logs and loads. But the loss was known before the backward
started. So its value is copied to the host as soon as it is computed, and reads are served from that copy. Otherwise it
is an ordinary tensor on its device, with its gradient.

Metrics, which have no gradient, are copied per token, and what a trainer derives from them is computed twice: by the
GPU in stream order, and by the host on a read. (A sum on the host may differ in its last digit.) Labels and masks came
from the host, so their host copies are remembered and need no transfer at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only


def start_host_copy(tensor: Tensor) -> Callable[[], Tensor]:
    """Start copying `tensor` to the host; the returned function waits for the copy only, not for later work."""
    copy = tensor.detach().to("cpu", non_blocking=True, copy=True)
    if not tensor.is_cuda:
        return lambda: copy
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(tensor.device))

    def read() -> Tensor:
        copied.synchronize()
        return copy

    return read


class HostMirroredTensor(Tensor):
    """Tensor with a host copy. Differentiable results computed from it have this type too, and scalars among them are
    copied."""

    _read_copy: Callable[[], Tensor] | None = None
    _copy_version: int = 0
    """The tensor's version at the time of the copy. If it differs now, the tensor was changed in place and the copy is
    stale."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Collection[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if not all(issubclass(cls, kind) for kind in types):  # other subclasses handle plain tensors and their own
            args, named = tree_map_only(cls, _plain, (args, named))
            return func(*args, **named)
        with torch._C.DisableTorchFunctionSubclass():
            if torch.compiler.is_compiling():
                return func(*args, **named)
            if not args or not isinstance(args[0], cls):
                result = func(*args, **named)
                return result if _is_existing(result, func, args, named) else _with_host_copy(result)
            first, others = args[0], args[1:]
            if func == _DATA and known_host_copy(first) is not None:
                first._read_copy = None  # in-place changes through .data do not bump the version
            read = _reader(first)
            if func in _HOST_READS:
                return func(read() if read is not None else _plain(first), *others, **named)
            if func in _PLAIN_OPS:
                return func(_plain(first), *others, **named)
            result = func(*args, **named)
            if _is_existing(result, func, args, named):
                return result
            if read is not None and func in _SAME_VALUE:
                return _attach_copy(result, read)
            if read is not None and (func in _FINITE_CHECKS or (func in _SCALINGS and _is_exact(others, named))):
                return _attach_copy(result, lambda: func(read(), *others))
            if read is not None and func in _METRIC_OPS and not result.requires_grad and not named:
                return _with_computed_copy(result, func, read, others)
            return _with_host_copy(result)


_HOST_READS = {Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__format__, Tensor.item, Tensor.tolist}
_PLAIN_OPS = {Tensor.__repr__, Tensor.__reduce_ex__, Tensor.__deepcopy__}
"""Operations that print, pickle or copy the tensor; they see a plain one."""
_DATA = cast(Any, Tensor.data).__get__
_SAME_VALUE = {Tensor.detach, torch.detach}
_SCALINGS = {Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__, Tensor.mul, Tensor.div, torch.mul, torch.div}
_METRIC_OPS = _SCALINGS | {Tensor.sum, torch.sum, Tensor.mean, torch.mean, Tensor.__gt__, Tensor.gt, torch.gt}
_FINITE_CHECKS = {torch.isnan, torch.isinf, torch.isfinite, Tensor.isnan, Tensor.isinf, Tensor.isfinite}


def _with_computed_copy(result: Tensor, func: Any, read: Callable[[], Tensor], others: tuple[Any, ...]) -> Tensor:
    """Have the host compute the result too, if it has copies of all operands."""
    readers = [_reader(operand) if isinstance(operand, Tensor) else None for operand in others]
    if any(isinstance(operand, Tensor) and reader is None for operand, reader in zip(others, readers, strict=True)):
        return result
    depth = 1 + max(getattr(reader, "depth", 0) for reader in (read, *readers))
    if depth > _MAX_DEPTH:
        return result

    def compute() -> Tensor:
        operands = [operand if reader is None else reader() for operand, reader in zip(others, readers, strict=True)]
        return cast(Tensor, func(read(), *operands))

    return _attach_copy(result, _Lazy(compute, depth))


_MAX_DEPTH = 16
"""Longest chain of operations that the host may have to compute on a read."""


class _Lazy:
    """Compute on first call, then drop the inputs."""

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
    """Return how to read the host copy, or None if there is none or it is stale."""
    if not isinstance(tensor, HostMirroredTensor) or tensor._copy_version != tensor._version:
        return None
    return tensor._read_copy


def _is_existing(result: Any, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Return whether the result is a pre-existing tensor that is not mirrored, such as a parameter updated by a
    loss."""
    if type(result) is HostMirroredTensor:
        return False
    return getattr(func, "__name__", None) == "__get__" or any(result is each for each in (*args, *named.values()))


def _is_exact(others: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Return whether the host's result is bit-identical: scaling by a power of two, such as the 1 of single-process
    trainers."""
    if len(others) != 1 or named or type(others[0]) not in (int, float):
        return False
    return math.isfinite(others[0]) and math.frexp(others[0])[0] == 0.5


def mirror_on_host(tensor: Tensor) -> Tensor:
    """Copy scalars derived from `tensor`, such as the loss, to the host early.

    Returns `tensor` unchanged if there are several processes: collectives change tensors in place without bumping the
    version.
    """
    if not _is_single_process():
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return _with_host_copy(tensor)


def mirror_metrics_on_host(*tensors: Tensor) -> None:
    """Copy these tensors, which have no gradient, to the host, so that metrics derived from them can be read early.

    They are copied whole, so they should be small: a few numbers per token.
    """
    if _is_single_process():
        for tensor in tensors:
            if type(tensor) in (Tensor, HostMirroredTensor) and not tensor.requires_grad:
                _attach_copy(tensor, start_host_copy(tensor))


class _HostSource:
    """Reader of a tensor that came from the host."""

    def __init__(self, host: Tensor) -> None:
        self._host = host

    def __call__(self) -> Tensor:
        return self._host


def remember_host_copy(host: Tensor, tensor: Tensor) -> None:
    """Record that `tensor` is a copy of `host`, so that its values can be read without a sync."""
    if _is_single_process() and type(tensor) is Tensor and not tensor.requires_grad:
        _attach_copy(tensor, _HostSource(host))


def known_host_copy(tensor: Tensor) -> Tensor | None:
    """Return the host tensor that `tensor` is a copy of (read-only); None if unknown or changed since."""
    read = _reader(tensor)
    return read() if isinstance(read, _HostSource) else None


def host_values(tensor: Tensor) -> Tensor:
    """Return the values of `tensor` on the host (read-only). Syncs unless its host copy is known."""
    known = known_host_copy(tensor)
    return tensor.cpu() if known is None else known


def _is_single_process() -> bool:
    return not torch.compiler.is_compiling() and not (dist.is_initialized() and dist.get_world_size() > 1)


def _with_host_copy(result: Any) -> Any:
    if type(result) not in (Tensor, HostMirroredTensor) or not result.requires_grad:
        return result
    return _attach_copy(result, start_host_copy(result)) if result.ndim == 0 else _as_mirrored(result)


def _attach_copy(result: Tensor, read: Callable[[], Tensor]) -> Tensor:
    if result.is_inference():  # inference tensors have no version counter
        return result
    mirrored = _as_mirrored(result)
    mirrored._read_copy, mirrored._copy_version = read, mirrored._version
    return mirrored


def _as_mirrored(result: Tensor) -> HostMirroredTensor:
    """Change the class in place: `as_subclass` would make a new tensor, with an extra autograd node in the backward."""
    result.__class__ = HostMirroredTensor
    return cast(HostMirroredTensor, result)
