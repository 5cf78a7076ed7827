"""Gradients whose computation is deferred."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class DeferredGrad:
    """The last rows of a gradient, computed on the first call to `rows`.

    The caller of the op calls `rows` when the GPU would otherwise idle; the backward pass calls it again and gets the
    cached result, if there is one.
    """

    def __init__(self) -> None:
        self._compute: Callable[[], Tensor] | None = None
        self._device_type = ""
        self._rows: Tensor | None = None

    def defer(self, compute: Callable[[], Tensor], device: torch.device) -> None:
        self._compute, self._device_type = compute, device.type

    def rows(self) -> Tensor | None:
        """Compute the deferred rows once and return them; None if nothing was deferred."""
        if self._compute is not None:
            with torch.autocast(self._device_type, enabled=False):  # the op chooses its own dtypes
                self._rows, self._compute = self._compute(), None
        return self._rows
