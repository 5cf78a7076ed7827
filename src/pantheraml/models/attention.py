"""Attention that stays inside documents, without a mask: variable-length kernels over packed batches.

A packed row holds several documents, and a token may look only at earlier tokens of its own. transformers says so with
an [S, S] mask for each row, which shuts out the fast kernels and computes the whole square. Here the documents'
boundaries go to a kernel that knows them. `use_document_attention` puts a model on it: it registers the implementation
with transformers under `NAME`, and gives the model's body a hook which finds the boundaries where the caller does not
hand them over (`cu_seq_lens_q` and `max_length_q`, as transformers names them for its own flash attention).
`use_context_parallel` adds that each process holds a part of every row (see `parallel/context.py`).

Which way a call goes: FlashAttention 4 takes what it can, where it is installed (see `flash.py`). Else rows that are
one document each take torch's causal attention; packed rows on a GPU in half precision take its variable-length kernel;
what that kernel lacks (CPU, float32, dropout, wide heads) is computed document by document, or with a mask. All ways
give the same numbers up to rounding.
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
from pantheraml.models.block_mask import block_mask
from pantheraml.models.modes import observed
from pantheraml.models.read_ahead import on_host
from pantheraml.models.rope import varying_rope
from pantheraml.parallel.context import check_heads, cut_sequence, heads_to_sequence, sequence_to_heads

NAME = "pantheraml_documents"

DENSE_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Torch's kernels for rows that are one document each, on a GPU: the first that can do it does it."""

_PLAIN_LAYERS = {"full_attention", "sliding_attention"}
_KERNEL_DTYPES = (torch.float16, torch.bfloat16)
_KERNEL_MAX_HEAD_DIM = 256
_KERNEL_CAPABILITY = (8, 0)


class UnknownScoresError(ValueError):
    """A model asks for something to be done to attention scores that is not done here."""


@dataclass(frozen=True)
class DocumentLayout:
    """How the tokens of a batch, row after row, fall into documents. None begins in one row and ends in another."""

    boundaries: Tensor | None
    """int32 [n + 1] on the model's device: 0, the end of each document; repeated ends are empty documents. None: every
    row is one document."""
    max_length: int
    """Tokens of the longest document (or more)."""

    def arguments(self) -> dict[str, Any]:
        """As keyword arguments for a model that is on document attention."""
        if self.boundaries is None:
            return {"max_length_q": self.max_length}
        return {"cu_seq_lens_q": self.boundaries, "max_length_q": self.max_length}


def register() -> None:
    """Make `NAME` known to transformers; any number of times."""
    AttentionInterface.register(NAME, document_attention)
    AttentionMaskInterface.register(NAME, document_mask)


def uses_document_attention(model: Any) -> bool:
    return getattr(getattr(model, "config", None), "_attn_implementation", None) == NAME


def use_document_attention(model: nn.Module) -> str | None:
    """Put the model on document attention, in place; None, or why it stays on the attention it has."""
    whole: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    if uses_document_attention(whole):
        return None
    body = getattr(whole, whole.base_model_prefix, whole)
    reason = _obstacle(whole, body)
    if reason is not None:
        return reason
    register()
    before = whole.config._attn_implementation
    with observed(model):
        expected = _alone(whole, body)
        whole.set_attn_implementation(NAME)
        handle = body.register_forward_pre_hook(_hand_over_documents, with_kwargs=True)
        try:
            agree = _agree(_packed_rows(whole, body), expected)
            reason = None if agree else "gives other results for documents with boundaries than for each alone"
        except UnknownScoresError as err:
            reason = str(err)
    if reason is None:
        return None
    handle.remove()
    whole.set_attn_implementation(before)
    return f"{type(whole).__name__} {reason}"


def use_context_parallel(model: nn.Module, group: dist.ProcessGroup, *, tensor: int = 1) -> None:
    """Put the model on document attention between the processes of `group`, in place; all of them call it together.
    `tensor`: over how many processes its heads will be cut afterwards.

    From now on a call that tells its documents (`DocumentLayout.arguments`) is about this process's part of every row,
    as `cut_sequence` gives it, while the documents are those of the whole rows. A call that tells none is about whole
    rows, and each process answers it by itself, as before.
    """
    whole: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    reason = use_document_attention(model) or _context_obstacle(whole.config.get_text_config())
    if reason is not None:
        raise UnsupportedModelError(
            f"Context parallelism is not possible: {reason}.",
            todo="Use parallel.context=1, and another way to divide the work: replicate, shard, tensor or pipeline.",
        )
    if tensor > 1:  # else the pass below finds out
        check_heads(whole.config.get_text_config().num_attention_heads, group.size(), tensor=tensor)
    body = getattr(whole, whole.base_model_prefix, whole)
    hook = functools.partial(_hand_over_group, group)
    handle = body.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
    with observed(model):
        same = _agrees_in_parts(whole, body, group)
    if not same:
        handle.remove()
        raise UnsupportedModelError(
            f"{type(whole).__name__} gives other results when its sequences are cut into parts.",
            todo="Use parallel.context=1.",
        )


def _context_obstacle(config: Any) -> str | None:
    for dropout in ("attention_dropout", "attn_pdrop"):  # as families call it
        if getattr(config, dropout, 0.0):
            return f"{dropout} is not 0 in the model's config, and processes would all drop the same scores"
    varying = varying_rope(config)
    if varying is not None:
        return f"its rotary embedding ({varying.kind}) depends on the longest sequence, which no process sees whole"
    return None


def _hand_over_group(
    group: dist.ProcessGroup, _body: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before the body runs, and before documents are looked for."""
    return (args, {**kwargs, "context_group": group}) if "max_length_q" in kwargs else None


def _agrees_in_parts(whole: Any, body: nn.Module, group: dist.ProcessGroup) -> bool:
    """Whether all processes find in their parts of two rows what each finds in the rows as a whole."""
    embedding = whole.get_input_embeddings().weight
    width = 2 * group.size()
    ids = torch.arange(2 * width, device=embedding.device).view(2, width) % embedding.shape[0]
    positions = torch.arange(width, device=embedding.device).repeat(2, 1)
    positions[0, width // 2 + 1 :] -= width // 2 + 1
    documents = documents_from_positions(positions, 2)
    expected = body(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    parts = {"input_ids": cut_sequence(ids, group), "position_ids": cut_sequence(positions, group)}
    found = body(**parts, use_cache=False, **documents.arguments()).last_hidden_state
    differ = torch.tensor(float(not _agree(found, cut_sequence(expected, group))), device=embedding.device)
    dist.all_reduce(differ, group=group)
    return not differ.item()


def _obstacle(whole: Any, body: nn.Module) -> str | None:
    """What in the model's make-up rules document attention out.

    A family that transformers runs with flash attention needs no mask besides causality, windows and documents.
    """
    name, config = type(whole).__name__, whole.config.get_text_config()
    if not whole._supports_sdpa:
        return f"{name} changes attention scores in a way that torch's attention does not know"
    if not (whole._supports_flash_attn and whole._supports_attention_backend):
        return f"{name} needs a mask of its own"
    if not getattr(config, "is_causal", True):
        return f"{name} is not causal"
    if body is whole:
        return f"{name} has no body apart from its output head"
    other = sorted(set(getattr(config, "layer_types", None) or ()) - _PLAIN_LAYERS)
    if other:
        return f"{name} has layers of another kind: {', '.join(other)}"
    parameters = inspect.signature(body.forward).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return f"{type(body).__name__} does not pass arguments on to its attention"
    return None


_PROBE = ((3, 3), (4, 2))
"""Documents of two rows."""


def _packed_rows(whole: Any, body: nn.Module) -> Tensor:
    """Hidden states of documents in two rows, one after the other."""
    embedding = whole.get_input_embeddings().weight
    ids = torch.arange(12, device=embedding.device).view(2, 6) % embedding.shape[0]
    counted = [torch.arange(length, device=embedding.device) for row in _PROBE for length in row]
    positions = torch.cat(counted).view(len(_PROBE), -1)
    hidden: Tensor = body(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    return hidden.flatten(0, 1)


def _alone(whole: Any, body: nn.Module) -> Tensor:
    """Of each of the same documents in a row of its own, which other tokens follow."""
    embedding = whole.get_input_embeddings().weight
    lengths = [length for row in _PROBE for length in row]
    starts = torch.tensor([0, *itertools.accumulate(lengths[:-1])], device=embedding.device)
    places = starts[:, None] + torch.arange(max(lengths), device=embedding.device)
    positions = torch.arange(max(lengths), device=embedding.device).repeat(len(lengths), 1)
    hidden = body(input_ids=places % embedding.shape[0], position_ids=positions, use_cache=False).last_hidden_state
    return torch.cat([hidden[number, :length] for number, length in enumerate(lengths)])


def _agree(found: Tensor, expected: Tensor) -> bool:
    """The same sums, perhaps in another order, through all layers."""
    if not torch.equal(found.isnan(), expected.isnan()):
        return False
    tolerance = 1e-4 if expected.dtype == torch.float32 else 5e-2
    # NaN in the weights is for the training step to report
    difference = (found - expected).float().nan_to_num(0.0).norm()
    return bool(difference <= tolerance * expected.float().nan_to_num(0.0).norm())


def documents_from_positions(position_ids: Tensor, rows: int) -> DocumentLayout:
    """A document begins where positions do not count on by one; waits for the device once, if the host has to ask."""
    positions = on_host(position_ids).expand(rows, -1).numpy()
    starts = np.ones(positions.shape, dtype=bool)
    starts[:, 1:] = np.diff(positions, axis=1) != 1
    return _documents(starts, position_ids.device)


def documents_from_padding(mask: Tensor) -> DocumentLayout | None:
    """Each row's tokens are a document, as is its padding; None if padding parts tokens. Waits for the device once, if
    the host has to ask."""
    kept = on_host(mask).numpy() != 0
    if kept.all():
        return DocumentLayout(None, kept.shape[1])
    starts = np.ones(kept.shape, dtype=bool)
    starts[:, 1:] = kept[:, 1:] != kept[:, :-1]
    if ((starts & kept).sum(axis=1) > 1).any():
        return None
    return _documents(starts, mask.device)


def _documents(starts: np.ndarray[Any, np.dtype[np.bool_]], device: torch.device) -> DocumentLayout:
    rows, width = starts.shape
    boundaries = np.append(np.flatnonzero(starts), starts.size).astype(np.int32)
    if len(boundaries) == rows + 1:
        return DocumentLayout(None, width)
    longest = int(np.diff(boundaries).max())
    return DocumentLayout(torch.from_numpy(boundaries).to(device, non_blocking=True), longest)


def _hand_over_documents(
    _body: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before the body runs: finds the documents once for all layers, unless the caller gave them or a cache is in use.

    An empty mask of four dimensions goes along: transformers takes such a mask as made already, and makes none.
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
    """For transformers' AttentionMaskInterface: no mask for plain causal attention over whole rows."""
    custom = arguments.get("attention_mask") is not None or arguments.get("use_vmap", False)
    if not custom and arguments["q_length"] == arguments["kv_length"]:
        return None
    made: Tensor | None = sdpa_mask(**arguments)
    return made


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
    """For transformers' AttentionInterface: query [B, H, S, D], key and value [B, K, S, D] -> [B, S, H, D]."""
    group = kwargs.pop("context_group", None)
    if group is not None:
        query, key, value = _as_autocast(query, key, value)
        query, key, value = sequence_to_heads(query, key, value, group)
        mixed, _ = document_attention(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
        return heads_to_sequence(mixed, group), None
    for unknown in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(unknown) is not None:
            raise UnknownScoresError(f"changes attention scores by {unknown!r}, which document attention does not know")
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    masked = attention_mask is not None and attention_mask.shape[-1] > 0
    if masked or not causal or query.shape[2] != key.shape[2]:  # generation from a cache, or a mask of someone's own
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=causal
        )
        return out, None
    documents = _given_documents(kwargs, query)
    window = kwargs.get("sliding_window")
    if window is not None and window >= documents.max_length:
        window = None
    if query.is_cuda:
        query, key, value = _as_autocast(query, key, value)
    if flash.serves(query, key, value, documents.boundaries, window=window, dropout=dropout):
        return flash.attend(query, key, value, documents.boundaries, window=window, scaling=scaling), None
    if documents.boundaries is None and window is None:
        return _rows(query, key, value, dropout=dropout, scaling=scaling), None
    boundaries = documents.boundaries
    if boundaries is None:
        tokens, width = query.shape[0] * query.shape[2], query.shape[2]
        boundaries = torch.arange(0, tokens + 1, width, dtype=torch.int32, device=query.device)
    documents = DocumentLayout(boundaries, documents.max_length)
    return _packed(query, key, value, documents, window=window, dropout=dropout, scaling=scaling), None


def _given_documents(kwargs: dict[str, Any], query: Tensor) -> DocumentLayout:
    """The documents that came with the call; without word of them, those that the positions tell."""
    width = query.shape[2]
    if "max_length_q" in kwargs:
        # A compiled layer must not be compiled anew for each batch's longest document; the row's length serves all.
        longest = width if torch.compiler.is_compiling() else kwargs["max_length_q"]
        return DocumentLayout(kwargs.get("cu_seq_lens_q"), longest)
    positions = kwargs.get("position_ids")
    return DocumentLayout(None, width) if positions is None else documents_from_positions(positions, query.shape[0])


def _rows(query: Tensor, key: Tensor, value: Tensor, *, dropout: float, scaling: float | None) -> Tensor:
    """Causal attention over whole rows."""
    backends = sdpa_kernel(DENSE_BACKENDS, set_priority=True) if query.is_cuda else contextlib.nullcontext()
    with backends:
        out = _attend(query, key, value, None, dropout=dropout, scaling=scaling)
    return out.transpose(1, 2).contiguous()


def _packed(
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
    if _kernel_serves(query, value, dropout):
        return _variable_length(query, key, value, documents, window=window, scaling=scaling)
    if query.is_cuda or torch.compiler.is_compiling():  # reading the boundaries would wait for the device
        mask = block_mask(boundaries, query.shape[0], query.shape[2], window)
        return _attend(query, key, value, mask, dropout=dropout, scaling=scaling).transpose(1, 2).contiguous()
    return _one_by_one(query, key, value, boundaries, window=window, dropout=dropout, scaling=scaling)


def _as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Autocast does not know the kernels; and under it rotary embeddings leave query and key wider than value."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)


def _kernel_serves(query: Tensor, value: Tensor, dropout: float) -> bool:
    head_dim = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in _KERNEL_DTYPES
        and dropout == 0.0
        and head_dim == value.shape[-1]
        and head_dim % 8 == 0
        and head_dim <= _KERNEL_MAX_HEAD_DIM
        and _has_kernel(query.device)
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_kernel(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= _KERNEL_CAPABILITY


def _variable_length(
    query: Tensor, key: Tensor, value: Tensor, documents: DocumentLayout, *, window: int | None, scaling: float | None
) -> Tensor:
    """The flash kernel over all rows laid end to end, which takes grouped heads and strided inputs as they are.

    The operator itself, which autograd and the compiler know, rather than `torch.nn.attention.varlen.varlen_attn`: that
    one's arguments differ from release to release (causality, grouped heads), these have stayed.
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
        window_size_left=-1 if window is None else window - 1,  # transformers counts the token itself
        window_size_right=0,
    )[0]
    return out.unflatten(0, (rows, width))


def _one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor,
    *,
    window: int | None,
    dropout: float,
    scaling: float | None,
) -> Tensor:
    """Each document as if it were alone."""
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
        parts.append(_attend(query[piece], key[piece], value[piece], mask, dropout=dropout, scaling=scaling))
    return torch.cat(parts, dim=2).transpose(1, 2).reshape(rows, width, query.shape[1], value.shape[-1]).contiguous()


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, dropout: float, scaling: float | None
) -> Tensor:
    """Torch's attention, causal if there is no mask."""
    groups = query.shape[1] // key.shape[1]
    native = query.is_cuda and mask is None and query.dtype in _KERNEL_DTYPES
    if groups > 1 and not native:  # elsewhere grouped heads would end in the kernel that keeps all scores
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
