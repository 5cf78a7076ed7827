"""Dispatch: ops run their Triton kernel on a GPU or in Triton's interpreter, and the torch reference otherwise."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator

from torch import Tensor


@functools.cache
def _interpreted() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


class _Forced:
    """Not a context variable: autograd runs backward on a GPU in threads of its own."""

    references = False


@contextlib.contextmanager
def references_only() -> Iterator[None]:
    """Context in which every op runs its torch reference, in all threads."""
    before, _Forced.references = _Forced.references, True
    try:
        yield
    finally:
        _Forced.references = before


def runs_triton(tensor: Tensor) -> bool:
    return (tensor.is_cuda or _interpreted()) and not _Forced.references
