"""Attention for ends of documents whose beginnings other documents have computed; see `shared_prefixes`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from pantheraml.base import log
from pantheraml.models.attention_kernels import as_autocast, sdpa, varlen_kernel_supports
from pantheraml.models.document_layout import DocumentLayout

logger = log.get(__name__)


def prefix_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: DocumentLayout,
    *,
    window: int | None,
    dropout: float,
    scaling: float | None,
) -> Tensor:
    """Attention of query [1, H, S, D] to key and value [1, K, S, D], for one row of documents with `prefixes`.

    Returns [1, S, H, D].
    """
    prefixes = documents.prefixes
    assert prefixes is not None
    query, key, value = as_autocast(query, key, value)
    prefixes = prefixes.to_device(key.device)
    queries = query[0].transpose(0, 1)
    keys, values = (prefixes.whole_rows(tensor[0].transpose(0, 1)) for tensor in (key, value))
    if varlen_kernel_supports(query, value, dropout) and _kernel_aligns_ends(query.device):
        whole = DocumentLayout(prefixes.boundaries, prefixes.max_length)
        return _varlen(queries, keys, values, documents, whole, window=window, scaling=scaling)[None]
    out = _one_by_one(queries, keys, values, prefixes.sizes, window=window, dropout=dropout, scaling=scaling)
    return out[None].contiguous()


def _one_by_one(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    sizes: Sequence[tuple[int, int]],
    *,
    window: int | None,
    dropout: float,
    scaling: float | None,
) -> Tensor:
    """Attention one document at a time; a mask over all documents would be quadratic in the batch."""
    own, whole = zip(*sizes, strict=True)
    pieces = zip(queries.split(own), keys.split(whole), values.split(whole), strict=True)
    parts = []
    for piece in pieces:
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in piece)
        mask = None
        if window is not None or query.shape[2] < key.shape[2]:
            position = torch.arange(key.shape[2], device=key.device)
            mask = _near(position[-query.shape[2] :], position, window)
        parts.append(sdpa(query, key, value, mask, dropout=dropout, scaling=scaling)[0].transpose(0, 1))
    return torch.cat(parts)


def _varlen(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    documents: DocumentLayout,
    whole: DocumentLayout,
    *,
    window: int | None,
    scaling: float | None,
) -> Tensor:
    """Flash kernel, of which each query sees the keys up to its own from the end of its document."""
    out: Tensor = torch.ops.aten._flash_attention_forward(
        queries,
        keys,
        values,
        documents.boundaries,
        whole.boundaries,
        documents.max_length,
        whole.max_length,
        0.0,
        True,
        False,
        scale=scaling,
        window_size_left=-1 if window is None else window - 1,  # transformers' window includes the token itself
        window_size_right=0,
    )[0]
    return out


def _near(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """[queries, keys]: True where the key's position is not after the query's, and within the window."""
    distance = query[:, None] - key
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


@functools.cache
def _kernel_aligns_ends(device: torch.device) -> bool:
    """Check on a few tokens that this version's kernel counts from the end of a document, forward and backward.

    In a thread of its own: the caller's may be in autocast, inference mode or a checkpoint, which would count the
    check's tensors among those to recompute.
    """
    with ThreadPoolExecutor(1) as alone:
        equal = alone.submit(_compare_with_kernel, device).result()
    if not equal:
        logger.warning(
            "rows that share a prompt attend one by one: torch's kernel for documents aligns their ends otherwise"
        )
    return equal


def _compare_with_kernel(device: torch.device) -> bool:
    generator = torch.Generator(device).manual_seed(0)
    sizes = ((2, 6), (3, 3))
    own, whole = (torch.tensor([0, a, a + b], dtype=torch.int32, device=device) for a, b in zip(*sizes, strict=True))
    layouts = DocumentLayout(own, 3), DocumentLayout(whole, 6)
    drawn = [torch.randn(size, 2, 64, generator=generator, device=device).bfloat16() for size in (5, 9, 9)]
    queries, keys, values = tensors = [tensor.requires_grad_() for tensor in drawn]
    exact = [tensor.detach().float().requires_grad_() for tensor in tensors]
    pairs: list[tuple[Tensor, Tensor]] = []
    for window in (None, 3):
        ours = _varlen(queries, keys, values, *layouts, window=window, scaling=None)
        theirs = _one_by_one(exact[0], exact[1], exact[2], sizes, window=window, dropout=0.0, scaling=None)
        pairs.append((ours, theirs))
        gradients = (torch.autograd.grad(o.float().square().sum(), t) for o, t in ((ours, tensors), (theirs, exact)))
        pairs += zip(*gradients, strict=True)
    return all(bool((a.float() - b).norm() <= 5e-2 * b.norm()) for a, b in pairs)
