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

import functools
import inspect
import itertools
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from pantheraml.base import log
from pantheraml.base.errors import UnsupportedModelError
from pantheraml.models import flash
from pantheraml.models.async_scalars import host_values
from pantheraml.models.attention_kernels import as_autocast, dense_attention, packed_attention
from pantheraml.models.document_layout import DocumentLayout
from pantheraml.models.eval_mode import eval_no_grad
from pantheraml.models.prefix_attention import prefix_attention
from pantheraml.models.rope import varying_rope
from pantheraml.models.shared_prefixes import find_shared_prefixes
from pantheraml.parallel.context import check_heads, heads_to_sequence, sequence_to_heads, shard_sequence

logger = log.get(__name__)

NAME = "pantheraml_documents"

_PLAIN_LAYERS = {"full_attention", "sliding_attention"}


class UnsupportedScoresError(ValueError):
    """The model modifies attention scores in an unsupported way."""


def register() -> None:
    """Register `NAME` with transformers; idempotent."""
    AttentionInterface.register(NAME, document_attention)
    AttentionMaskInterface.register(NAME, document_mask)


def uses_document_attention(model: Any) -> bool:
    return getattr(getattr(model, "config", None), "_attn_implementation", None) == NAME


def shares_prefixes(model: Any) -> bool:
    """Return whether rows may share their beginnings; see `shared_prefixes`."""
    return uses_document_attention(model) and bool(getattr(model, "shares_prefixes", False))


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
            whole.shares_prefixes = close and _can_share(whole, body)
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


_SHARED = 10
"""Tokens that two more probe rows have in common."""
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


def _can_share(whole: Any, body: nn.Module) -> bool:
    try:
        return _allclose(*_shared_rows(whole, body))
    except Exception as err:  # noqa: BLE001 - a family's code may raise anything; rows stay whole
        logger.debug("rows of %s share no prompts: %s", type(whole).__name__, err)
        return False


def _shared_rows(whole: Any, body: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the hidden states of two rows that begin alike, with the beginning computed once, and as they are."""
    embedding = whole.get_input_embeddings().weight
    begin, ends = list(range(_SHARED)), ([_SHARED, _SHARED + 1], [_SHARED + 2, _SHARED + 3])
    rows = np.array([[*begin, *end] for end in ends]) % embedding.shape[0]
    sharing = find_shared_prefixes(rows, [0, 0])
    assert sharing is not None
    columns = torch.from_numpy(np.concatenate(sharing.kept)).to(embedding.device)
    own = [0, *itertools.accumulate(map(len, sharing.kept))]
    boundaries = torch.tensor(own, dtype=torch.int32, device=embedding.device)
    prefixes = sharing.prefixes.to_device(embedding.device)
    documents = DocumentLayout(boundaries, rows.shape[1], prefixes)
    tokens = torch.from_numpy(rows).to(embedding.device)
    computed = torch.cat([tokens[row, kept] for row, kept in enumerate(sharing.kept)])
    call = {"input_ids": computed[None], "position_ids": columns[None], **documents.arguments()}
    shared: Tensor = body(**call, use_cache=False).last_hidden_state
    positions = torch.arange(rows.shape[1], device=embedding.device).expand(tokens.shape)
    separate: Tensor = body(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state
    return prefixes.whole_rows(shared[0]), separate.flatten(0, 1)


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
        documents = DocumentLayout(kwargs.get("cu_seq_lens_q"), kwargs["max_length_q"], kwargs.get("shared_prefixes"))
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
        query, key, value = as_autocast(query, key, value)
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
    prefixes, window = documents.prefixes, kwargs.get("sliding_window")
    longest = documents.max_length if prefixes is None else prefixes.max_length
    if window is not None and window >= longest:
        window = None
    if prefixes is not None:
        return prefix_attention(query, key, value, documents, window=window, dropout=dropout, scaling=scaling), None
    if query.is_cuda:
        query, key, value = as_autocast(query, key, value)
    if flash.supports(query, key, value, documents.boundaries, window=window, dropout=dropout):
        return flash.attend(query, key, value, documents.boundaries, window=window, scaling=scaling), None
    if documents.boundaries is None and window is None:
        return dense_attention(query, key, value, dropout=dropout, scaling=scaling), None
    boundaries = documents.boundaries
    if boundaries is None:
        tokens, width = query.shape[0] * query.shape[2], query.shape[2]
        boundaries = torch.arange(0, tokens + 1, width, dtype=torch.int32, device=query.device)
    documents = DocumentLayout(boundaries, documents.max_length)
    return packed_attention(query, key, value, documents, window=window, dropout=dropout, scaling=scaling), None


def _documents_of_call(kwargs: dict[str, Any], query: Tensor) -> DocumentLayout:
    """Return the documents passed with the call, else those found from the positions."""
    width = query.shape[2]
    if "max_length_q" in list(kwargs):  # of the dict itself, torch.compile of torch 2.11 would guard the value
        # Use the row length under torch.compile, or every batch's longest document would trigger a recompile.
        longest = width if torch.compiler.is_compiling() else kwargs["max_length_q"]
        return DocumentLayout(kwargs.get("cu_seq_lens_q"), longest, kwargs.get("shared_prefixes"))
    positions = kwargs.get("position_ids")
    return DocumentLayout(None, width) if positions is None else documents_from_positions(positions, query.shape[0])
