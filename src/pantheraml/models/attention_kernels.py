"""Attention kernels for documents, in transformers' layout: query [B, H, S, D], key and value [B, K, S, D]."""

from __future__ import annotations

import contextlib
import itertools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pantheraml.models.block_mask import block_mask
from pantheraml.models.document_layout import DocumentLayout

DENSE_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""SDPA backends for rows of one document each on a GPU, in order of priority."""

_KERNEL_DTYPES = (torch.float16, torch.bfloat16)
_KERNEL_MAX_HEAD_DIM = 256
_KERNEL_CAPABILITY = (8, 0)


def dense_attention(query: Tensor, key: Tensor, value: Tensor, *, dropout: float, scaling: float | None) -> Tensor:
    """Causal attention over whole rows."""
    backends = sdpa_kernel(DENSE_BACKENDS, set_priority=True) if query.is_cuda else contextlib.nullcontext()
    with backends:
        out = sdpa(query, key, value, None, dropout=dropout, scaling=scaling)
    return out.transpose(1, 2).contiguous()


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: DocumentLayout,
    *,
    window: int | None,
    dropout: float,
    scaling: float | None,
) -> Tensor:
    boundaries = documents.boundaries
    assert boundaries is not None
    query, key, value = as_autocast(query, key, value)
    if varlen_kernel_supports(query, value, dropout):
        return varlen_attention(query, key, value, documents, window=window, scaling=scaling)
    if query.is_cuda or torch.compiler.is_compiling():  # reading the boundaries would sync with the device
        mask = block_mask(boundaries, query.shape[0], query.shape[2], window)
        return sdpa(query, key, value, mask, dropout=dropout, scaling=scaling).transpose(1, 2).contiguous()
    return _per_document_attention(query, key, value, boundaries, window=window, dropout=dropout, scaling=scaling)


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast to the autocast dtype: autocast does not cover these kernels, and RoPE leaves query and key wider than
    value."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)


def varlen_kernel_supports(query: Tensor, value: Tensor, dropout: float) -> bool:
    head_dim = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in _KERNEL_DTYPES
        and dropout == 0.0
        and head_dim == value.shape[-1]
        and head_dim % 8 == 0
        and head_dim <= _KERNEL_MAX_HEAD_DIM
        and _has_varlen_kernel(query.device)
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_varlen_kernel(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= _KERNEL_CAPABILITY


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, documents: DocumentLayout, *, window: int | None, scaling: float | None
) -> Tensor:
    """Flash kernel over all rows concatenated; it takes grouped heads and strided inputs directly.

    Calls the aten operator, which autograd and torch.compile support, instead of
    `torch.nn.attention.varlen.varlen_attn`, whose arguments differ between releases (causality, grouped heads).
    """
    rows, _, width, _ = query.shape
    flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    out: Tensor = torch.ops.aten._flash_attention_forward(
        *flat,
        documents.boundaries,
        documents.boundaries,
        documents.max_length,
        documents.max_length,
        0.0,
        True,
        False,
        scale=scaling,
        window_size_left=-1 if window is None else window - 1,  # transformers' window includes the token itself
        window_size_right=0,
    )[0]
    return out.unflatten(0, (rows, width))


def _per_document_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor,
    *,
    window: int | None,
    dropout: float,
    scaling: float | None,
) -> Tensor:
    """Attention one document at a time."""
    rows, width = query.shape[0], query.shape[2]
    ends = boundaries.tolist()
    parts = []
    for begin, end in itertools.pairwise(ends):
        if begin == end:
            continue
        row, first = divmod(begin, width)
        piece = (slice(row, row + 1), slice(None), slice(first, first + end - begin))
        mask = None
        if window is not None and window < end - begin:
            mask = torch.ones(end - begin, end - begin, dtype=torch.bool, device=query.device).tril().triu(1 - window)
        parts.append(sdpa(query[piece], key[piece], value[piece], mask, dropout=dropout, scaling=scaling))
    return torch.cat(parts, dim=2).transpose(1, 2).reshape(rows, width, query.shape[1], value.shape[-1]).contiguous()


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, dropout: float, scaling: float | None
) -> Tensor:
    """SDPA, causal if there is no mask."""
    groups = query.shape[1] // key.shape[1]
    native = query.is_cuda and mask is None and query.dtype in _KERNEL_DTYPES
    if (
        groups > 1 and not native
    ):  # otherwise grouped heads fall back to the math backend, which materializes all scores
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=groups > 1 and native,
    )
