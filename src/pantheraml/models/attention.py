"""Document attention: packed rows without a mask, using variable-length kernels.

A packed row holds several documents, and a token may attend only to earlier tokens of its own. transformers expresses
that with an [S, S] mask per row, which rules out the fast kernels and computes the whole square. Here the document
boundaries go to a kernel that supports them. `use_document_attention` registers the implementation with transformers as
`NAME` and adds a hook to the model body that finds the boundaries if the caller does not pass them (`cu_seq_lens_q` and
`max_length_q`, transformers' names for its own flash attention). `use_context_parallel` splits every row over the ranks
of a group (see `parallel/context.py`).

Dispatch: FlashAttention 4, where installed, takes what it supports (see `flash.py`). Otherwise rows of one document
each use torch's causal attention; packed rows on a GPU in half precision use its variable-length kernel; what that
kernel lacks (CPU, float32, dropout, large heads) runs document by document, or with a mask. All paths agree up to
rounding.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from pantheraml.base.errors import UnsupportedModelError
from pantheraml.models import flash
from pantheraml.models.async_scalars import host_values
from pantheraml.models.block_mask import block_mask
from pantheraml.models.eval_mode import eval_no_grad
from pantheraml.models.rope import varying_rope
from pantheraml.parallel.context import check_heads, heads_to_sequence, sequence_to_heads, shard_sequence

NAME = "pantheraml_documents"

DENSE_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""SDPA backends for rows of one document each on a GPU, in order of priority."""

_PLAIN_LAYERS = {"full_attention", "sliding_attention"}
_KERNEL_DTYPES = (torch.float16, torch.bfloat16)
_KERNEL_MAX_HEAD_DIM = 256
_KERNEL_CAPABILITY = (8, 0)


class UnsupportedScoresError(ValueError):
    """The model modifies attention scores in an unsupported way."""


@dataclass(frozen=True)
class DocumentLayout:
    """How the tokens of a batch, row by row, are divided into documents. No document crosses rows."""

    boundaries: Tensor | None
    """int32 [n + 1] on the model's device: 0, then the end of each document; repeated ends are empty documents. None:
    every row is one document."""
    max_length: int
    """Length of the longest document, or an upper bound."""

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for a model that uses document attention."""
        if self.boundaries is None:
            return {"max_length_q": self.max_length}
        return {"cu_seq_lens_q": self.boundaries, "max_length_q": self.max_length}


def register() -> None:
    """Register `NAME` with transformers; idempotent."""
    AttentionInterface.register(NAME, document_attention)
    AttentionMaskInterface.register(NAME, document_mask)


def uses_document_attention(model: Any) -> bool:
    return getattr(getattr(model, "config", None), "_attn_implementation", None) == NAME


def use_document_attention(model: nn.Module) -> str | None:
    """Switch the model to document attention in place; return None, or why it keeps its attention."""
    whole: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    if uses_document_attention(whole):
        return None
    body = getattr(whole, whole.base_model_prefix, whole)
    reason = _obstacle(whole, body)
    if reason is not None:
        return reason
    register()
    before = whole.config._attn_implementation
    with eval_no_grad(model):
        expected = _separate_rows(whole, body)
        whole.set_attn_implementation(NAME)
        handle = body.register_forward_pre_hook(_pass_documents, with_kwargs=True)
        try:
            close = _allclose(_packed_rows(whole, body), expected)
            reason = None if close else "computes different values for documents with boundaries than for separate ones"
        except UnsupportedScoresError as err:
            reason = str(err)
    if reason is None:
        return None
    handle.remove()
    whole.set_attn_implementation(before)
    return f"{type(whole).__name__} {reason}"


def use_context_parallel(model: nn.Module, group: dist.ProcessGroup, *, tensor: int = 1) -> None:
    """Switch the model to context-parallel document attention in place; collective over `group`.

    `tensor`: degree of tensor parallelism that will be applied to its heads later.

    From now on a call that passes its documents (`DocumentLayout.arguments`) is on this rank's part of every row, as
    `shard_sequence` returns it, while the documents are those of the whole rows. A call without documents is on whole
    rows, and each rank computes it independently, as before.
    """
    whole: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    reason = use_document_attention(model) or _context_obstacle(whole.config.get_text_config())
    if reason is not None:
        raise UnsupportedModelError(
            f"Context parallelism is not possible: {reason}.",
            fix="Use parallel.context=1, and another kind of parallelism: replicate, shard, tensor or pipeline.",
        )
    if tensor > 1:  # otherwise the forward below checks it
        check_heads(whole.config.get_text_config().num_attention_heads, group.size(), tensor=tensor)
    body = getattr(whole, whole.base_model_prefix, whole)
    hook = functools.partial(_pass_context_group, group)
    handle = body.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
    with eval_no_grad(model):
        matches = _matches_unsplit(whole, body, group)
    if not matches:
        handle.remove()
        raise UnsupportedModelError(
            f"{type(whole).__name__} computes different values when its sequences are split over ranks.",
            fix="Use parallel.context=1.",
        )


def _context_obstacle(config: Any) -> str | None:
    for dropout in ("attention_dropout", "attn_pdrop"):  # the name differs between families
        if getattr(config, dropout, 0.0):
            return f"{dropout} is not 0 in the model's config, and all ranks would drop the same scores"
    varying = varying_rope(config)
    if varying is not None:
        return f"its RoPE ({varying.kind}) depends on the longest sequence, which no rank sees whole"
    return None


def _pass_context_group(
    group: dist.ProcessGroup, _body: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of the body; runs before `_pass_documents`."""
    return (args, {**kwargs, "context_group": group}) if "max_length_q" in kwargs else None


def _matches_unsplit(whole: Any, body: nn.Module, group: dist.ProcessGroup) -> bool:
    """Return whether every rank computes the same for its part of two rows as for the whole rows."""
    embedding = whole.get_input_embeddings().weight
    width = 2 * group.size()
    ids = torch.arange(2 * width, device=embedding.device).view(2, width) % embedding.shape[0]
    positions = torch.arange(width, device=embedding.device).repeat(2, 1)
    positions[0, width // 2 + 1 :] -= width // 2 + 1
    documents = documents_from_positions(positions, 2)
    expected = body(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    parts = {"input_ids": shard_sequence(ids, group), "position_ids": shard_sequence(positions, group)}
    actual = body(**parts, use_cache=False, **documents.arguments()).last_hidden_state
    differ = torch.tensor(float(not _allclose(actual, shard_sequence(expected, group))), device=embedding.device)
    dist.all_reduce(differ, group=group)
    return not differ.item()


def _obstacle(whole: Any, body: nn.Module) -> str | None:
    """Return what in the model's structure rules out document attention.

    A family that transformers runs with flash attention needs no mask besides causality, windows and documents.
    """
    name, config = type(whole).__name__, whole.config.get_text_config()
    if not whole._supports_sdpa:
        return f"{name} modifies attention scores in a way that torch's attention does not support"
    if not (whole._supports_flash_attn and whole._supports_attention_backend):
        return f"{name} needs a mask of its own"
    if not getattr(config, "is_causal", True):
        return f"{name} is not causal"
    if body is whole:
        return f"{name} has no body apart from its output head"
    other = sorted(set(getattr(config, "layer_types", None) or ()) - _PLAIN_LAYERS)
    if other:
        return f"{name} has unsupported layer types: {', '.join(other)}"
    parameters = inspect.signature(body.forward).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return f"{type(body).__name__} does not forward keyword arguments to its attention"
    return None


_PROBE = ((3, 3), (4, 2))
"""Document lengths of two probe rows."""


def _packed_rows(whole: Any, body: nn.Module) -> Tensor:
    """Return the hidden states of the probe documents, packed into two rows."""
    embedding = whole.get_input_embeddings().weight
    ids = torch.arange(12, device=embedding.device).view(2, 6) % embedding.shape[0]
    restarted = [torch.arange(length, device=embedding.device) for row in _PROBE for length in row]
    positions = torch.cat(restarted).view(len(_PROBE), -1)
    hidden: Tensor = body(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    return hidden.flatten(0, 1)


def _separate_rows(whole: Any, body: nn.Module) -> Tensor:
    """Return the hidden states of the same documents, each in a row of its own with other tokens after it."""
    embedding = whole.get_input_embeddings().weight
    lengths = [length for row in _PROBE for length in row]
    starts = torch.tensor([0, *itertools.accumulate(lengths[:-1])], device=embedding.device)
    tokens = starts[:, None] + torch.arange(max(lengths), device=embedding.device)
    positions = torch.arange(max(lengths), device=embedding.device).repeat(len(lengths), 1)
    hidden = body(input_ids=tokens % embedding.shape[0], position_ids=positions, use_cache=False).last_hidden_state
    return torch.cat([hidden[row, :length] for row, length in enumerate(lengths)])


def _allclose(actual: Tensor, expected: Tensor) -> bool:
    """Compare sums that may have been accumulated in different orders through all layers."""
    if not torch.equal(actual.isnan(), expected.isnan()):
        return False
    tolerance = 1e-4 if expected.dtype == torch.float32 else 5e-2
    # NaN in the weights is reported by the training step
    difference = (actual - expected).float().nan_to_num(0.0).norm()
    return bool(difference <= tolerance * expected.float().nan_to_num(0.0).norm())


def documents_from_positions(position_ids: Tensor, rows: int) -> DocumentLayout:
    """Start a document wherever positions do not increase by one; syncs once if the host has no copy of the
    positions."""
    positions = host_values(position_ids).expand(rows, -1).numpy()
    starts = np.ones(positions.shape, dtype=bool)
    starts[:, 1:] = np.diff(positions, axis=1) != 1
    return _documents(starts, position_ids.device)


def documents_from_padding(mask: Tensor) -> DocumentLayout | None:
    """Treat each row's tokens as one document, and its padding as another; None if padding lies between tokens.

    Syncs once if the host has no copy of the mask.
    """
    is_token = host_values(mask).numpy() != 0
    if is_token.all():
        return DocumentLayout(None, is_token.shape[1])
    starts = np.ones(is_token.shape, dtype=bool)
    starts[:, 1:] = is_token[:, 1:] != is_token[:, :-1]
    if ((starts & is_token).sum(axis=1) > 1).any():
        return None
    return _documents(starts, mask.device)


def _documents(starts: np.ndarray[Any, np.dtype[np.bool_]], device: torch.device) -> DocumentLayout:
    rows, width = starts.shape
    boundaries = np.append(np.flatnonzero(starts), starts.size).astype(np.int32)
    if len(boundaries) == rows + 1:
        return DocumentLayout(None, width)
    longest = int(np.diff(boundaries).max())
    return DocumentLayout(torch.from_numpy(boundaries).to(device, non_blocking=True), longest)


def _pass_documents(
    _body: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of the body: find the documents once for all layers, unless a cache is in use.

    It also passes an empty 4-D mask, which transformers takes as ready-made, so that it builds none.
    """
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    tokens = args[0] if args else kwargs.get("input_ids")
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    if len(args) > 1 or tokens is None or kwargs.get("past_key_values") is not None:
        return None
    documents: DocumentLayout | None
    if "max_length_q" in kwargs:
        documents = DocumentLayout(kwargs.get("cu_seq_lens_q"), kwargs["max_length_q"])
    elif mask is not None:
        documents = documents_from_padding(mask) if isinstance(mask, Tensor) and mask.ndim == 2 else None
    elif positions is not None:
        documents = documents_from_positions(positions, tokens.shape[0])
    else:
        documents = DocumentLayout(None, tokens.shape[1])
    if documents is None:
        return None
    return args, {**kwargs, **documents.arguments(), "attention_mask": tokens.new_empty((1, 1, 1, 0))}


def document_mask(**arguments: Any) -> Tensor | None:
    """Mask function for transformers' AttentionMaskInterface: no mask for plain causal attention over whole rows."""
    custom = arguments.get("attention_mask") is not None or arguments.get("use_vmap", False)
    if not custom and arguments["q_length"] == arguments["kv_length"]:
        return None
    mask: Tensor | None = sdpa_mask(**arguments)
    return mask


def document_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers' AttentionInterface: query [B, H, S, D], key and value [B, K, S, D] -> [B, S,
    H, D]."""
    group = kwargs.pop("context_group", None)
    if group is not None:
        query, key, value = _as_autocast(query, key, value)
        query, key, value = sequence_to_heads(query, key, value, group)
        out, _ = document_attention(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
        return heads_to_sequence(out, group), None
    for argument in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(argument) is not None:
            raise UnsupportedScoresError(
                f"modifies attention scores with {argument!r}, which document attention does not support"
            )
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    masked = attention_mask is not None and attention_mask.shape[-1] > 0
    if masked or not causal or query.shape[2] != key.shape[2]:  # generation from a cache, or a custom mask
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=causal
        )
        return out, None
    documents = _documents_of_call(kwargs, query)
    window = kwargs.get("sliding_window")
    if window is not None and window >= documents.max_length:
        window = None
    if query.is_cuda:
        query, key, value = _as_autocast(query, key, value)
    if flash.supports(query, key, value, documents.boundaries, window=window, dropout=dropout):
        return flash.attend(query, key, value, documents.boundaries, window=window, scaling=scaling), None
    if documents.boundaries is None and window is None:
        return _dense_attention(query, key, value, dropout=dropout, scaling=scaling), None
    boundaries = documents.boundaries
    if boundaries is None:
        tokens, width = query.shape[0] * query.shape[2], query.shape[2]
        boundaries = torch.arange(0, tokens + 1, width, dtype=torch.int32, device=query.device)
    documents = DocumentLayout(boundaries, documents.max_length)
    return _packed_attention(query, key, value, documents, window=window, dropout=dropout, scaling=scaling), None


def _documents_of_call(kwargs: dict[str, Any], query: Tensor) -> DocumentLayout:
    """Return the documents passed with the call, else those found from the positions."""
    width = query.shape[2]
    if "max_length_q" in kwargs:
        # Use the row length under torch.compile, or every batch's longest document would trigger a recompile.
        longest = width if torch.compiler.is_compiling() else kwargs["max_length_q"]
        return DocumentLayout(kwargs.get("cu_seq_lens_q"), longest)
    positions = kwargs.get("position_ids")
    return DocumentLayout(None, width) if positions is None else documents_from_positions(positions, query.shape[0])


def _dense_attention(query: Tensor, key: Tensor, value: Tensor, *, dropout: float, scaling: float | None) -> Tensor:
    """Causal attention over whole rows."""
    backends = sdpa_kernel(DENSE_BACKENDS, set_priority=True) if query.is_cuda else contextlib.nullcontext()
    with backends:
        out = _sdpa(query, key, value, None, dropout=dropout, scaling=scaling)
    return out.transpose(1, 2).contiguous()


def _packed_attention(
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
    query, key, value = _as_autocast(query, key, value)
    if _varlen_kernel_supports(query, value, dropout):
        return _varlen_attention(query, key, value, documents, window=window, scaling=scaling)
    if query.is_cuda or torch.compiler.is_compiling():  # reading the boundaries would sync with the device
        mask = block_mask(boundaries, query.shape[0], query.shape[2], window)
        return _sdpa(query, key, value, mask, dropout=dropout, scaling=scaling).transpose(1, 2).contiguous()
    return _per_document_attention(query, key, value, boundaries, window=window, dropout=dropout, scaling=scaling)


def _as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast to the autocast dtype: autocast does not cover these kernels, and RoPE leaves query and key wider than
    value."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)


def _varlen_kernel_supports(query: Tensor, value: Tensor, dropout: float) -> bool:
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


def _varlen_attention(
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
        parts.append(_sdpa(query[piece], key[piece], value[piece], mask, dropout=dropout, scaling=scaling))
    return torch.cat(parts, dim=2).transpose(1, 2).reshape(rows, width, query.shape[1], value.shape[-1]).contiguous()


def _sdpa(
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
