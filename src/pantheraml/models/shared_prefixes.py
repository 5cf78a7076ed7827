"""Rows that begin with the same tokens, with the common beginning computed once.

The completions of one prompt (GRPO, RLOO) and both answers of a preference pair (DPO) repeat their prompt in every row.
In a causal model, hidden states of a prefix do not depend on what follows. So only the first of these rows computes it,
and the others compute what is their own; attention gives them the keys and values of the whole row. The result and the
gradients are the same, up to the order of sums.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

LEAST_TOKENS = 4
"""Shorter prefixes are not worth the search."""


class SharedPrefixes(NamedTuple):
    """How whole rows, one after another, are made of the tokens that are computed.

    A NamedTuple, so that libraries that move arguments between devices find its tensors.
    """

    source: Tensor
    """Computed token that each token of the whole rows is."""
    boundaries: Tensor
    """int32 [rows + 1]: 0, then the end of each whole row."""
    max_length: int
    """Length of the longest whole row."""
    first: Tensor
    """First token of the whole rows that each computed token is."""
    repeated: Tensor
    """Computed tokens that are several tokens of the whole rows."""
    copies: Tensor
    """Those tokens of the whole rows, in the order of `repeated`."""
    counts: Tensor
    """How many they are, for each of `repeated`."""

    def whole_rows(self, tokens: Tensor) -> Tensor:
        """Return [whole tokens, ...] of [computed tokens, ...]; the gradient is summed in float32, in a fixed order."""
        rows: Tensor = _WholeRows.apply(tokens, self)
        return rows

    def to_device(self, device: torch.device) -> SharedPrefixes:
        tensors: dict[str, Any] = {name: each for name, each in self._asdict().items() if isinstance(each, Tensor)}
        return self._replace(**{name: each.to(device, non_blocking=True) for name, each in tensors.items()})


class _WholeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, prefixes: SharedPrefixes) -> Tensor:
        ctx.save_for_backward(prefixes.first, prefixes.repeated, prefixes.copies, prefixes.counts)
        return tokens.index_select(0, prefixes.source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        first, repeated, copies, counts = ctx.saved_tensors
        rows = grad.flatten(1)
        wide = torch.promote_types(rows.dtype, torch.float32)
        # The host made the counts, so they need no check, which would sync.
        sums = torch.segment_reduce(rows.index_select(0, copies).to(wide), "sum", lengths=counts, unsafe=True)
        own = rows.index_select(0, first).index_copy_(0, repeated, sums.to(rows.dtype))
        return own.unflatten(1, grad.shape[1:]), None


class Sharing(NamedTuple):
    """Which tokens of a batch are computed."""

    kept: list[np.ndarray[Any, Any]]
    """Of each row, the indices of its computed tokens within the row."""
    prefixes: SharedPrefixes


def find_shared_prefixes(rows: Sequence[np.ndarray[Any, Any]], columns: Sequence[int]) -> Sharing | None:
    """Find the longest prefix that each row shares with an earlier one; None if no rows share any.

    `rows`: token ids; `columns`: position of the first token. Only rows that begin at the same position can share.
    """
    sources: list[np.ndarray[Any, Any]] = []
    kept: list[np.ndarray[Any, Any]] = []
    alike: defaultdict[tuple[int, bytes], list[int]] = defaultdict(list)
    computed = 0
    for index, (row, column) in enumerate(zip(rows, columns, strict=True)):
        # A row computes its last token itself, so that no row is empty.
        earlier = alike[column, row[:LEAST_TOKENS].tobytes()] if len(row) > LEAST_TOKENS else []
        lengths = [_common(row[:-1], rows[other]) for other in earlier]
        length = max(lengths, default=0)
        given = sources[earlier[lengths.index(length)]][:length] if length else np.empty(0, np.int64)
        own = np.arange(len(row) - length)
        sources.append(np.append(given, computed + own))
        kept.append(length + own)
        computed += len(own)
        earlier.append(index)
    source = np.concatenate(sources)
    if computed == len(source):
        return None
    return Sharing(kept, _tables(source, computed, [len(row) for row in rows]))


def _common(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> int:
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


def _tables(source: np.ndarray[Any, Any], computed: int, lengths: Sequence[int]) -> SharedPrefixes:
    by_token = np.argsort(source, kind="stable")
    counts = np.bincount(source, minlength=computed)
    starts = np.cumsum(counts) - counts
    is_repeated = counts > 1
    return SharedPrefixes(
        source=torch.from_numpy(source),
        boundaries=torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32)),
        max_length=max(lengths),
        first=torch.from_numpy(by_token[starts]),
        repeated=torch.from_numpy(np.flatnonzero(is_repeated)),
        copies=torch.from_numpy(by_token[is_repeated[source[by_token]]]),
        counts=torch.from_numpy(counts[is_repeated]),
    )
