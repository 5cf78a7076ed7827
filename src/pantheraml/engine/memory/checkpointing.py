"""Activation checkpointing.

    none        save all activations
    selective   save the outputs of matmuls and attention, which are expensive, and recompute everything else
    full        recompute each decoder layer from its saved input
    offload     like full, with the inputs offloaded to host memory and prefetched one layer ahead

Gradients are identical in every mode: the RNG state is restored for recomputation. Modes use the checkpointing hook of
transformers' decoder layers (`GradientCheckpointingLayer`) and apply to training only: without gradients, or in eval
mode, a layer runs normally.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from pantheraml.base.errors import UnsupportedModelError
from pantheraml.engine.memory.host_offload import HostStore
from pantheraml.models.fast import CheckpointedForward, CheckpointRecompute
from pantheraml.specs.train import Checkpointing

Run = Callable[..., Any]
"""A layer with its keyword arguments bound, as transformers passes it to a checkpointing function."""

MATMULS = frozenset(
    {
        *("aten::mm", "aten::addmm", "aten::linear"),
        *("aten::_scaled_mm", "aten::_grouped_mm", "aten::_scaled_grouped_mm", "pantheraml::fp8_linear"),
    }
)
"""Not bmm: in eager attention its outputs are the scores, quadratic in the sequence length."""

MIN_INNER_DIM = 256
"""Matmuls with a smaller inner dimension (LoRA's B) take no longer than reading back a saved output."""

ATTENTION = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "aten::_flash_attention_forward",
        "pantheraml::flash_forward",
        "torch_attn::_varlen_attn",
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
    }
)


def apply_checkpointing(model: nn.Module, mode: Checkpointing) -> int:
    """Set the mode of every decoder layer of `model`, in place; return their number. The mode can be changed later."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if mode != "none" and not layers:
        raise UnsupportedModelError(
            f"train.activation_checkpointing={mode} works on transformers' decoder layers, and this model has none.",
            fix="Use train.activation_checkpointing=none and, if memory is short, a smaller train.micro_batch_size.",
        )
    function = _function(mode)
    for layer in layers:
        layer.gradient_checkpointing = function is not None
        layer._gradient_checkpointing_func = function
    return len(layers)


def _function(mode: Checkpointing) -> Callable[..., Any] | None:
    if mode == "selective":
        return _selective
    if mode == "full":
        return _full
    if mode == "offload":
        return partial(_offloaded, HostStore())
    return None


def _full(run: Run, *args: Any) -> Any:
    return checkpoint(run, *args, use_reentrant=False, context_fn=_whole_contexts)


def _whole_contexts() -> tuple[Any, Any]:
    """Contexts of the forward pass and of the recomputation."""
    return CheckpointedForward(), CheckpointRecompute()


def _selective(run: Run, *args: Any) -> Any:
    if not torch.is_grad_enabled():  # the contexts would save outputs that are never used
        return run(*args)
    return checkpoint(run, *args, use_reentrant=False, context_fn=_selective_contexts)


def _selective_contexts() -> tuple[Any, Any]:
    first, second = create_selective_checkpoint_contexts(_policy)
    return first, second


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = op.name()
    if name in MATMULS:
        left: Tensor = args[1] if name == "aten::addmm" else args[0]
        save = left.shape[-1] >= MIN_INNER_DIM
    else:
        # Skipping an op with dropout in recomputation would leave the RNG state behind, and change later dropout masks.
        save = name in ATTENTION and not _has_dropout(op, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def _has_dropout(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return float(given.get("dropout_p", 0.0)) > 0


def _offloaded(store: HostStore, run: Run, hidden: Tensor, *others: Any) -> Any:
    """Like `_full`, with the layer's input `hidden` in host memory between its forward and its backward."""
    if not torch.is_grad_enabled():
        return run(hidden, *others)
    offloaded = store.offload(hidden)

    def run_on(here: Tensor) -> Any:
        return run(offloaded.take(), *others)

    # The empty tensor tells `checkpoint` which device's RNG state to save.
    return checkpoint(run_on, hidden.new_empty(0), use_reentrant=False, context_fn=_whole_contexts)
