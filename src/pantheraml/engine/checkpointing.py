"""Activation checkpointing: what the backward pass computes again instead of keeping it from the forward pass.

    none        nothing; everything is kept
    selective   all but matrix products and attention, whose results are dear to compute and are kept
    full        each decoder layer; its input is kept
    offload     each decoder layer; its input waits in host memory and comes back one layer ahead of its use

Gradients are the same numbers in every mode: random generators are put back for the second computation. Modes act on
transformers' decoder layers (`GradientCheckpointingLayer`), through the place those layers keep for it, in training
alone: without gradients, or in eval mode, a layer runs as ever.
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
from pantheraml.engine.host_memory import HostStore
from pantheraml.models.fast import Recomputing, ToBeRecomputed
from pantheraml.specs.train import Checkpointing

Run = Callable[..., Any]
"""A layer with its keyword arguments bound, as transformers hands it to a checkpointing function."""

PRODUCTS = frozenset(
    {
        *("aten::mm", "aten::addmm", "aten::linear"),
        *("aten::_scaled_mm", "aten::_grouped_mm", "aten::_scaled_grouped_mm", "pantheraml::fp8_linear"),
    }
)
"""Not bmm: where attention is spelt out, its products are the scores, quadratic in the length."""

SMALLEST_INNER = 256
"""Products over fewer terms (the second half of an adapter) take no longer than reading back what was kept of them."""

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
    """Set the mode of every decoder layer of `model`, in place; how many layers there are. It can be set again."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if mode != "none" and not layers:
        raise UnsupportedModelError(
            f"train.activation_checkpointing={mode} works on transformers' decoder layers, and this model has none.",
            todo="Use train.activation_checkpointing=none and, if memory is short, a smaller train.micro_batch_size.",
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
    """Of the first run and of the second."""
    return ToBeRecomputed(), Recomputing()


def _selective(run: Run, *args: Any) -> Any:
    if not torch.is_grad_enabled():  # the contexts would keep results that nobody fetches
        return run(*args)
    return checkpoint(run, *args, use_reentrant=False, context_fn=_selective_contexts)


def _selective_contexts() -> tuple[Any, Any]:
    first, second = create_selective_checkpoint_contexts(_policy)
    return first, second


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = op.name()
    if name in PRODUCTS:
        left: Tensor = args[1] if name == "aten::addmm" else args[0]
        dear = left.shape[-1] >= SMALLEST_INNER
    else:
        # With dropout inside, an op that is not run again would leave the generator behind, and later dropout differ.
        dear = name in ATTENTION and not _drops(op, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE


def _drops(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return float(given.get("dropout_p", 0.0)) > 0


def _offloaded(store: HostStore, run: Run, hidden: Tensor, *others: Any) -> Any:
    """`_full`, with `hidden`, the layer's input, in host memory from the end of its forward pass to its backward."""
    if not torch.is_grad_enabled():
        return run(hidden, *others)
    kept = store.keep(hidden)

    def run_on(here: Tensor) -> Any:
        return run(kept.take(), *others)

    # The empty tensor tells `checkpoint` whose random generators the layer uses.
    return checkpoint(run_on, hidden.new_empty(0), use_reentrant=False, context_fn=_whole_contexts)
