"""Attention for ends of documents whose beginnings other documents have computed; see `shared_prefixes`."""

from __future__ import annotations

import functools
import itertools

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
    prefixes, boundaries = documents.prefixes, documents.boundaries
    assert prefixes is not None
    assert boundaries is not None
    query, key, value = as_autocast(query, key, value)
    prefixes = prefixes.to_device(key.device)
    queries = query[0].transpose(0, 1)
    keys, values = (prefixes.whole_rows(tensor[0].transpose(0, 1)) for tensor in (key, value))
    if varlen_kernel_supports(query, value, dropout) and _kernel_aligns_ends(query.device):
        whole = DocumentLayout(prefixes.boundaries, prefixes.max_length)
        return _varlen(queries, keys, values, documents, whole, window=window, scaling=scaling)[None]
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (queries, keys, values))
    if query.is_cuda:  # reading the boundaries would sync with the device
        mask = _mask(boundaries, prefixes.boundaries, query.shape[2], key.shape[2], window)
        return sdpa(query, key, value, mask, dropout=dropout, scaling=scaling).transpose(1, 2).contiguous()
    parts = []
    ends = zip(*(itertools.pairwise(each.tolist()) for each in (boundaries, prefixes.boundaries)), strict=True)
    for (begin, end), (first, last) in ends:
        own, document = slice(begin, end), slice(first, last)
        mask = _near(torch.arange(last - first - (end - begin), last - first), torch.arange(last - first), window)
        piece = query[:, :, own], key[:, :, document], value[:, :, document]
        parts.append(sdpa(*piece, mask.to(query.device), dropout=dropout, scaling=scaling))
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous()


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


def _mask(own: Tensor, whole: Tensor, queries: int, keys: int, window: int | None) -> Tensor:
    """[queries, keys]: True where the key is in the query's document, not after it, and within the window.

    `own` and `whole`: boundaries of the ends and of the whole documents; both end with the same token.
    """
    position, other = (torch.arange(size, dtype=own.dtype, device=own.device) for size in (queries, keys))
    document = torch.searchsorted(own, position, right=True)
    same = document[:, None] == torch.searchsorted(whole, other, right=True)
    return same & _near(whole[document] - own[document] + position, other, window)


def _near(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """[queries, keys]: True where the key's position is not after the query's, and within the window."""
    distance = query[:, None] - key
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


@functools.cache
def _kernel_aligns_ends(device: torch.device) -> bool:
    """Check on a few tokens that this version's kernel counts from the end of a document, forward and backward."""
    generator = torch.Generator(device).manual_seed(0)
    own = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
    whole = torch.tensor([0, 6, 9], dtype=torch.int32, device=device)
    with torch.enable_grad():
        tensors = [
            torch.randn(size, 2, 64, generator=generator, device=device).bfloat16().requires_grad_()
            for size in (5, 9, 9)
        ]
        layouts = DocumentLayout(own, 3), DocumentLayout(whole, 6)
        ours = _varlen(tensors[0], tensors[1], tensors[2], *layouts, window=None, scaling=None)
        mask = _mask(own, whole, 5, 9, None)
        query, key, value = (tensor.transpose(0, 1)[None].float() for tensor in tensors)
        theirs = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)[0].transpose(0, 1)
        pairs = [(ours, theirs)]
        pairs += zip(*(torch.autograd.grad(out.float().square().sum(), tensors) for out in (ours, theirs)), strict=True)
    equal = all(bool((a.float() - b.float()).norm() <= 5e-2 * b.float().norm()) for a, b in pairs)
    if not equal:
        logger.warning(
            "rows that share a prompt attend with a mask: torch's kernel for documents aligns them otherwise"
        )
    return equal
