"""Rows that begin with the same tokens, with the common beginning computed once.

The completions of one prompt (GRPO, RLOO) and both answers of a preference pair (DPO) repeat their prompt in every row.
In a causal model, hidden states of a prefix do not depend on what follows. So only one of these rows computes it,
and the others compute what is their own; attention gives them the keys and values of the whole row. The result and the
gradients are the same, up to the order of sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_Array = np.ndarray[Any, Any]


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
    sizes: tuple[tuple[int, int], ...]
    """Of each row, how many of its tokens are computed, and its length."""
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

    kept: list[_Array]
    """Of each row, the indices of its computed tokens within the row."""
    prefixes: SharedPrefixes


def find_shared_prefixes(rows: Sequence[_Array], columns: Sequence[int]) -> Sharing | None:
    """Find the longest prefix that each row shares with others; None if no rows share any.

    `rows`: token ids; `columns`: position of the first token. Only rows that begin at the same position can share.
    """
    # In this order, no row before another has more in common with it than the one just before it.
    order = sorted(range(len(rows)), key=lambda index: (columns[index], rows[index].tobytes()))
    shared = [0] * len(rows)
    for before, index in itertools.pairwise(order):
        if columns[before] == columns[index]:
            # A row computes its last token itself, so that no row is empty.
            shared[index] = _common(rows[index][:-1], rows[before])
    if not any(shared):
        return None
    kept = [np.arange(length, len(row)) for length, row in zip(shared, rows, strict=True)]
    starts = np.cumsum([0, *map(len, kept)])
    sources = [np.empty(0, np.int64)] * len(rows)
    for before, index in zip([order[0], *order], order, strict=False):
        sources[index] = np.append(sources[before][: shared[index]], starts[index] + np.arange(len(kept[index])))
    return Sharing(
        kept, _tables(np.concatenate(sources), [(len(k), len(row)) for k, row in zip(kept, rows, strict=True)])
    )


def _common(one: _Array, other: _Array) -> int:
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


def _tables(source: _Array, sizes: Sequence[tuple[int, int]]) -> SharedPrefixes:
    own, lengths = zip(*sizes, strict=True)
    by_token = np.argsort(source, kind="stable")
    counts = np.bincount(source, minlength=sum(own))
    starts = np.cumsum(counts) - counts
    is_repeated = counts > 1
    return SharedPrefixes(
        source=torch.from_numpy(source),
        boundaries=torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32)),
        max_length=max(lengths),
        sizes=tuple(sizes),
        first=torch.from_numpy(by_token[starts]),
        repeated=torch.from_numpy(np.flatnonzero(is_repeated)),
        copies=torch.from_numpy(by_token[is_repeated[source[by_token]]]),
        counts=torch.from_numpy(counts[is_repeated]),
    )
