"""Modules that are trained in full beside the adapters: the input embedding, the output head, `modules_to_save`.

PEFT trains a copy and keeps the original, which passes without the adapter use. Here the copies are float32 whatever
the base's dtype or quantization, because updates of a small learning rate vanish in bf16; only what goes in and out of
them has the base's dtype. A tied embedding and head share one copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft.utils.constants import EMBEDDING_LAYER_NAMES
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from pantheraml.base import log
from pantheraml.base.errors import ConfigError, UnsupportedModelError
from pantheraml.models.model_kind import classifier_head, is_classifier
from pantheraml.models.quantize.quantized_linear import QuantizedLinear

logger = log.get(__name__)

_CONVERTED = "is_trained_in_float32"
CLASSIFIER_HEADS = ("classifier", "score")
"""Names of heads that PEFT trains in full, with task_type="SEQ_CLS"."""


@dataclass(frozen=True)
class FullModules:
    """Modules to train in full, by the names that PEFT's config has; `tied`: embedding and head share one copy."""

    names: tuple[str, ...] = ()
    tied: bool = False


def split_targets(
    model: PreTrainedModel,
    targets: str | Iterable[str] | None,
    modules_to_save: Sequence[str] | None,
    *,
    ensure_weight_tying: bool,
) -> tuple[str | list[str] | None, FullModules]:
    """Divide `targets` into layers for LoRA and modules to train in full, which are `modules_to_save` and the ends.

    PEFT itself trains a classifier's head in full.
    """
    ends = {"input": model.get_input_embeddings(), "output": model.get_output_embeddings()}
    named = dict(model.named_modules(remove_duplicate=False))
    tops = [*ends.values(), *classifier_head(model)]
    end_names = [name for name, module in named.items() if any(module is top for top in tops)]
    given = [targets] if isinstance(targets, str) and _matches(targets, end_names) else targets
    layers: str | list[str] | None = None
    by_peft = CLASSIFIER_HEADS if is_classifier(model) else ()
    full = [name for name in dict.fromkeys(modules_to_save or ()) if name not in by_peft]
    if given is None or isinstance(given, str):
        layers = given
    else:
        given = list(given)
        layers = [target for target in given if not _matches(target, end_names)]
        full += [target for target in given if target not in (*layers, *full, *by_peft)]
    for name in full:
        if not _matches(name, named):
            ours = sorted({end.rpartition(".")[2] for end in end_names})
            raise ConfigError(
                f"modules_to_save names a module that this model does not have: {name}.",
                fix=f"Its embedding and output head are {', '.join(ours)}.",
            )
    full_ends = [name for name in full if _matches(name, end_names)]
    if not full_ends or not _is_tied(ends["input"], ends["output"]) or not ensure_weight_tying:
        return layers, FullModules(tuple(full))
    embedding = next(name for name, module in named.items() if module is ends["input"])
    if embedding.rpartition(".")[2] not in EMBEDDING_LAYER_NAMES:
        raise UnsupportedModelError(
            f"{full_ends[0]} is tied, and PEFT can share a copy only between"
            f" {' and '.join(EMBEDDING_LAYER_NAMES)}, not with {embedding}.",
            fix="Leave it out, or set ensure_weight_tying=False to train it apart from the other.",
        )
    logger.info(
        "the output head is tied to the input embedding: one copy is trained for both (ensure_weight_tying=False "
        "trains them apart)"
    )
    others = [name for name in full if name not in full_ends]
    return layers, FullModules((embedding, *others), tied=True)


def _matches(target: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name == target or name.endswith(f".{target}")]


def _is_tied(embedding: nn.Module | None, head: nn.Module | None) -> bool:
    weight = getattr(head, "weight", None)
    return weight is not None and weight is getattr(embedding, "weight", None)


def forward_module(module: Any) -> Any:
    """Return the module that a forward runs: of a module with a trained copy, that, unless adapters are disabled."""
    if not isinstance(module, ModulesToSaveWrapper):
        return module
    active = module.active_adapters
    if module.disable_adapters or not active or active[0] not in module.modules_to_save:
        return module.original_module
    return module.modules_to_save[active[0]]


def trained_copy(module: Any) -> nn.Module:
    """Return the trained copy of a wrapped module, even while adapters are disabled."""
    active = module.active_adapters
    return cast(nn.Module, module.modules_to_save[active[0]] if active else module.original_module)


def share_one_copy(embedding: nn.Module, head: nn.Module) -> bool:
    """Return whether both ends have a trained copy, and its weight is the same."""
    both = isinstance(embedding, ModulesToSaveWrapper) and isinstance(head, ModulesToSaveWrapper)
    return both and _is_tied(trained_copy(embedding), trained_copy(head))


def use_float32_copies(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the trained copies in `model`, whose base computes in `dtype`, to float32, dequantized."""
    converted: dict[str, int] = {}
    for name, wrapper in model.named_modules():
        if not isinstance(wrapper, ModulesToSaveWrapper):
            continue
        for adapter in wrapper.modules_to_save:
            trains = adapter in wrapper.active_adapters and not wrapper.disable_adapters
            copied = _dense(wrapper.modules_to_save[adapter], trainable=trains)
            wrapper.modules_to_save[adapter] = copied
            if _to_float32(copied, dtype):
                converted[name] = sum(parameter.numel() for parameter in copied.parameters())
    if converted:
        logger.info(
            "trained in full, in float32: %s (%.1f million weights)",
            ", ".join(name.rpartition(".")[2] for name in converted),
            sum(converted.values()) / 1e6,
        )


def _dense(module: nn.Module, *, trainable: bool) -> nn.Module:
    """Return `module` with the quantized layers in it dequantized: these have no weights to train."""
    for name, layer in list(module.named_modules()):
        if isinstance(layer, QuantizedLinear):
            dense = layer.to_linear(torch.float32).requires_grad_(trainable)
            if not name:
                return dense
            module.set_submodule(name, dense)
    return module


def _to_float32(module: nn.Module, dtype: torch.dtype) -> bool:
    """Convert the parameters in place, which keeps ties; return whether there was anything to do."""
    parameters = [p for p in module.parameters() if p.is_floating_point()]
    if getattr(module, _CONVERTED, False):
        return False
    setattr(module, _CONVERTED, True)
    for parameter in parameters:
        parameter.data = parameter.data.float()
    if isinstance(module, nn.Embedding):
        # Gemma's scale of embeddings is rounded to the weight's dtype in the forward; the base was trained with that.
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype).float())
    if dtype != torch.float32:
        module.register_forward_pre_hook(_Cast(torch.float32).inputs)
        module.register_forward_hook(_Cast(dtype))
    return bool(parameters)


class _Cast:
    """Casts floating-point inputs or the output of a module to `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def inputs(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(self._cast(value) for value in args)

    def __call__(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        return self._cast(output)

    def _cast(self, value: Any) -> Any:
        return value.to(self.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
