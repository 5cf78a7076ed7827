"""Gradients that are left for later."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Later:
    """Rows of a gradient, the last ones. Whoever hands one over calls `rows` at a good time; whoever needs them calls
    it, too, and by then they may have been formed."""

    def __init__(self) -> None:
        self._form: Callable[[], Tensor] | None = None
        self._kind = ""
        self._rows: Tensor | None = None

    def leave(self, form: Callable[[], Tensor], device: torch.device) -> None:
        self._form, self._kind = form, device.type

    def rows(self) -> Tensor | None:
        """None if none were left."""
        if self._form is not None:
            with torch.autocast(self._kind, enabled=False):  # whoever asks: the op chooses its own dtypes
                self._rows, self._form = self._form(), None
        return self._rows
