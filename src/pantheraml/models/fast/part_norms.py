"""RMSNorm of queries and of keys, over all their heads together (OLMo 2 and 3), or per head where there is no RoPE.

RMSNorm per head with RoPE has its own kernel (`kernels.head_norm_rope`). Here the norm's and RoPE's kernels run one
after the other, with a copy of the merged matrix between them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pantheraml.kernels.rms_norm import rms_norm, rms_norm_backward, rms_norm_weight_gradient


class PartNorms(NamedTuple):
    query: Tensor
    """Weight: of all heads, or of each."""
    key: Tensor
    epsilon: float
    plus_one: bool
    columns: tuple[int, int]
    """Columns of queries and keys in the merged matrix, which starts with them."""

    def forward(self, merged: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the merged matrix with normalized queries and keys, and what `backward` needs."""
        queries, keys, rest = self._split(merged)
        parts, saved = [], []
        for part, weight in ((queries, self.query), (keys, self.key)):
            rows = part.reshape(-1, weight.numel())
            normed = rms_norm(rows, weight, self.epsilon, plus_one=self.plus_one, quantize=False)
            parts.append(normed.qdata.view(part.shape))
            saved += [rows, normed.inverse]
        return torch.cat([*parts, rest], dim=1), tuple(saved)

    def backward(
        self, g: Tensor, saved: tuple[Tensor, ...], *, weights: bool
    ) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
        """Return the gradients of the merged matrix, from that of the result, and with `weights` of the weights."""
        d_queries, d_keys, rest = self._split(g)
        parts: list[Tensor] = []
        gradients: list[Tensor | None] = []
        for part, weight, rows, inverse in (
            (d_queries, self.query, *saved[:2]),
            (d_keys, self.key, *saved[2:]),
        ):
            d_rows = part.reshape(rows.shape)
            d_part = rms_norm_backward(d_rows, rows, weight, inverse, plus_one=self.plus_one)
            parts.append(d_part.view(part.shape))
            gradients.append(rms_norm_weight_gradient(d_rows, rows, inverse, weight.dtype) if weights else None)
        return torch.cat([*parts, rest], dim=1), (gradients[0], gradients[1])

    def _split(self, merged: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys = self.columns
        first, second, rest = merged.split([queries, keys, merged.shape[1] - queries - keys], dim=1)
        return first, second, rest
