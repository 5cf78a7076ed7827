"""Dispatch: ops run their Triton kernel on a GPU or in Triton's interpreter, and the torch reference otherwise."""

from __future__ import annotations

import functools
import importlib.util

from torch import Tensor


@functools.cache
def _interpreted() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def runs_triton(tensor: Tensor) -> bool:
    return tensor.is_cuda or _interpreted()
