"""Notices before a run over long sequences: whether MLPs run in tiles, and which attention kernels are chosen."""

from __future__ import annotations

from typing import Any

import torch

from pantheraml.models import flash
from pantheraml.models.attention import NAME as DOCUMENT_ATTENTION
from pantheraml.models.fast.layers import is_fused
from pantheraml.models.fast.linear_groups import LoraGroup
from pantheraml.models.fast.tiled_mlp import TILE, is_wider


def long_sequence_note(model: Any, *, rows: int, width: int, lean: bool) -> str | None:
    """Return one line for batches of `rows` sequences of `width` tokens; None if they are shorter than two tiles.

    `lean`: activations are recomputed layer by layer.
    """
    if rows * width < 2 * TILE:
        return None
    layers: list[Any] = [layer for layer in model.modules() if is_fused(layer)]
    tiled = [layer for layer in layers if lean and _is_tiled(layer)]
    if tiled:
        tiles = f"MLPs of {len(tiled)} layers run in tiles of {TILE:,} tokens, one at a time in memory"
    elif not layers:
        tiles = "MLPs run whole: tiles need fused layers"
    elif not lean:
        tiles = "MLPs run whole: tiles need activation checkpointing, full or offload"
    else:
        tiles = "MLPs run whole: they are trainable, or smaller than attention"
    return f"{rows} x {width:,} tokens: {tiles}; attention: {_attention(model, width)}"


def _is_tiled(layer: Any) -> bool:
    parts = layer.fused_parts
    first, second = parts.groups[2:]
    if not (isinstance(first, LoraGroup) and isinstance(second, LoraGroup)):
        return False
    return is_wider(first, second, parts.heads.queries * parts.heads.size)


def _attention(model: Any, width: int) -> str:
    config = model.config.get_text_config()
    chosen = config._attn_implementation
    if chosen != DOCUMENT_ATTENTION:
        return f"transformers' {chosen}"
    weight = model.get_input_embeddings().weight
    if weight.device.type != "cuda":
        return "torch's, on the CPU"
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    compute = weight.dtype if weight.dtype != torch.float32 else torch.get_autocast_dtype("cuda")
    if flash.likely_supported(weight.device, compute, size, width):
        return "FlashAttention 4, the fastest on this GPU where it is exact"
    return "torch's: cuDNN for rows of one document, its variable-length kernel for packed ones"
