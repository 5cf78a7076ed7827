"""Whether backward needs the inputs of the query and key norms.

Usually it computes what it needs from their outputs, which attention saves anyway. Where weights are trained, or very
uneven, the inputs are kept: see `kernels.head_norm_rope`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pantheraml.kernels.head_norm_rope import HeadNorms, output_determines_input


class KeptInputs:
    """Decides for the query and key norms of one layer, and remembers it until a weight changes: deciding syncs."""

    def __init__(self) -> None:
        self._known: list[tuple[Tensor, int, bool] | None] = [None, None]

    def of(self, norms: HeadNorms) -> tuple[bool, bool]:
        if norms.query.requires_grad or norms.key.requires_grad:
            return True, True
        return self._of(0, norms.query, norms), self._of(1, norms.key, norms)

    def _of(self, place: int, weight: Tensor, norms: HeadNorms) -> bool:
        known = self._known[place]
        if known is None or known[0] is not weight or known[1] != weight._version:
            with torch.no_grad():
                known = weight, weight._version, not output_determines_input(norms.gain(weight))
            self._known[place] = known
        return known[2]
