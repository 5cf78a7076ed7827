"""State of one pass through the fused layers, which recomputed layers must find again.

With activation checkpointing a layer runs a second time in backward. By then other passes may have run, with the
adapter disabled or another one active (the reference pass of DPO and KTO), and the layers' current state is theirs. A
pass is known by its RoPE table, the same object for all of its layers, also when they are recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


def in_backward() -> bool:
    """Return whether autograd is running a backward: a layer called now is being recomputed."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class PassDecisions:
    """Why the layers of a pass ran unfused, or None, for every pass that may be recomputed.

    Entries live as long as the pass's RoPE table. Copies of a model start without entries.
    """

    def __init__(self) -> None:
        self._reasons = WeakTensorKeyDictionary()

    def record(self, cos: Tensor, reason: str | None) -> None:
        self._reasons[cos] = reason

    def of(self, cos: Tensor, default: str | None) -> str | None:
        """Return the reason of the pass; `default` if it was not recorded."""
        return cast("str | None", self._reasons.get(cos, default))

    def __reduce__(self) -> tuple[type[PassDecisions], tuple[()]]:
        return PassDecisions, ()


class RopeCache:
    """Cosine and sine of each row's position, expanded once per pass.

    All layers of a pass get the same tables, often one sequence broadcast over the batch; they are expanded, and saved
    for backward, once and not once per layer. Entries live as long as the tables they were made from, because
    recomputed layers must find those of their own pass after another pass has started. Copies of a model start with an
    empty cache.
    """

    def __init__(self) -> None:
        self._entries = WeakTensorKeyDictionary()

    def rows(self, embeddings: Sequence[Tensor], shape: torch.Size, *, new_pass: bool) -> tuple[Tensor, ...]:
        """Return cos and sin as [rows, size], for hidden states of `shape`; `new_pass`: a pass starts."""
        cos, sin = embeddings
        for_shape, for_sin, rows = self._entries.get(cos, (None, None, ()))
        if new_pass or shape != for_shape or sin is not for_sin:
            # detached: a view would keep its base alive, and no entry would ever be dropped
            detached = (e if e.requires_grad else e.detach() for e in embeddings)
            rows = tuple(e.expand(*shape[:-1], -1).reshape(-1, e.shape[-1]).contiguous() for e in detached)
            self._entries[cos] = shape, sin, rows
        return cast("tuple[Tensor, ...]", rows)

    def __reduce__(self) -> tuple[type[RopeCache], tuple[()]]:
        return RopeCache, ()
