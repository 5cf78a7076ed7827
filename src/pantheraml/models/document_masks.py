"""Attention masks that isolate packed documents, for attention that takes no boundaries.

transformers builds such masks from positions, but not for every family: some never pass the positions on (GPT-OSS,
OPT), and chunks are counted from the start of the row (Llama 4). Here masks are built before the body runs, one per
layer type, as the body would have built them for each document alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

_KINDS = ("full_attention", "sliding_attention", "chunked_attention")


def use_document_masks(body: Any) -> RemovableHandle | None:
    """Pass masks to `body` whenever it gets positions without a mask; return None if it has layers that take no
    mask."""
    kinds = set(getattr(body.config.get_text_config(), "layer_types", None) or ())
    if kinds - set(_KINDS):
        return None
    handle: RemovableHandle = body.register_forward_pre_hook(_pass_masks, with_kwargs=True)
    return handle


def _pass_masks(
    body: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    positions = kwargs.get("position_ids")
    tokens = args[0] if args else kwargs.get("input_ids")
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    if len(args) > 1 or tokens is None or positions is None or positions.ndim != 2:
        return None
    if kwargs.get("attention_mask") is not None or kwargs.get("past_key_values") is not None:
        return None
    # in DataParallel replicas, weights are not parameters
    embedded = body.get_input_embeddings().weight if tokens.ndim == 2 else tokens
    masks = document_masks(body.config, positions.expand(tokens.shape[0], -1), embedded.dtype)
    return args, {**kwargs, "attention_mask": masks}


def document_masks(config: Any, positions: Tensor, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """Build [B, 1, S, S] from positions [B, S]: a dict by layer type if the config has layer types. Does not sync.

    `dtype`: of the additive mask, where attention takes one.
    """
    config = config.get_text_config()
    convert = _mask_format(config._attn_implementation, dtype)
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        return convert(_allowed(positions, window=None, chunk=None))
    sizes = {
        "full_attention": (None, None),
        "sliding_attention": (getattr(config, "sliding_window", None), None),
        "chunked_attention": (None, getattr(config, "attention_chunk_size", None)),
    }
    return {kind: convert(_allowed(positions, *sizes[kind])) for kind in _KINDS if kind in kinds}


def _allowed(positions: Tensor, window: int | None, chunk: int | None) -> Tensor:
    """True where the key is in the query's document, not after it, within the window and in the same chunk."""
    index = torch.arange(positions.shape[1], device=positions.device)
    starts = torch.ones_like(positions, dtype=torch.bool)
    starts[:, 1:] = positions.diff(dim=1) != 1
    document = starts.cumsum(1)
    distance = index[:, None] - index[None, :]
    near = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    allowed = (document[:, :, None] == document[:, None, :]) & near
    if chunk is not None:
        first = torch.where(starts, index, 0).cummax(1).values
        part = (index - first) // chunk
        allowed &= part[:, :, None] == part[:, None, :]
    return allowed[:, None]


def _mask_format(attention: str, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return the conversion to the attention's mask format: boolean, or additive for eager."""
    if attention != "eager":
        return lambda allowed: allowed
    lowest = torch.finfo(dtype).min
    return lambda allowed: torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, lowest)
