"""PEFT patches: its own functions adapt our models as `FastLanguageModel.get_peft_model` does.

TRL's trainers call `peft.get_peft_model` if they get a `peft_config`, and people call it or `PeftModel.from_pretrained`
themselves. PEFT does not know our quantized layers, and knows nothing of fused ones. All of its functions come through
two: the method that injects an adapter, and the constructor of `PeftModel`. A third patch saves scaled RoPE.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pantheraml.hooks.library_patch import LibraryPatch
from pantheraml.hooks.registry import REGISTRY
from pantheraml.models.adapters import prepare_config
from pantheraml.models.causal_lm import FastCausalLM, fast_model
from pantheraml.models.classifier import check_task


def _over_quantized(inject_adapter: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(inject_adapter)
    def inject(self: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        if isinstance(model, FastCausalLM):
            prepare_config(model, self.peft_config[adapter_name])
        inject_adapter(self, model, adapter_name, *args, **kwargs)

    return inject


def _then_speed_up(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def initialize(self: Any, model: Any, peft_config: Any, *args: Any, **kwargs: Any) -> None:
        check_task(model, getattr(peft_config, "task_type", None))
        init(self, model, peft_config, *args, **kwargs)
        if isinstance(model, FastCausalLM) and model.on_adapters is not None and not peft_config.inference_mode:
            model.on_adapters(model, self)

    return initialize


def _with_rope(save_pretrained: Callable[..., None]) -> Callable[..., None]:
    """Save the RoPE of a base whose positions were scaled: the adapter is only right with it."""

    @functools.wraps(save_pretrained)
    def save(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        save_pretrained(self, save_directory, *args, **kwargs)
        model = fast_model(self)
        if model is not None and model.rope is not None and kwargs.get("is_main_process", True):
            model.rope.write(Path(save_directory))

    return save


QUANTIZED_LAYERS = LibraryPatch(
    library="peft",
    versions=">=0.21,<0.22",
    module="peft.tuners.lora.model",
    class_name="LoraModel",
    name="inject_adapter",
    make=_over_quantized,
    fallback="only FastLanguageModel.get_peft_model can add adapters to quantized weights",
)
FUSED_LAYERS = LibraryPatch(
    library="peft",
    versions=">=0.21,<0.22",
    module="peft.peft_model",
    class_name="PeftModel",
    name="__init__",
    make=_then_speed_up,
    fallback="layers are fused only by FastLanguageModel.get_peft_model",
)

SAVED_ROPE = LibraryPatch(
    library="peft",
    versions=">=0.21,<0.22",
    module="peft.peft_model",
    class_name="PeftModel",
    name="save_pretrained",
    make=_with_rope,
    fallback="pass the same max_seq_length when the adapter is loaded again: it is not saved with scaled RoPE",
)

_ALL = (QUANTIZED_LAYERS, FUSED_LAYERS, SAVED_ROPE)


def apply() -> None:
    for patch in _ALL:
        REGISTRY.apply(patch)


def revert() -> None:
    for patch in _ALL:
        REGISTRY.revert(patch)
