"""`FastVisionModel`: vision-language models for existing training code; `FastModel`: models of either kind.

Loading, quantization, fused layers and adapters are those of `FastLanguageModel`; the decoder inside the model is
fused and quantized as in a text model, and the vision tower stays as transformers has it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel

from pantheraml.api.language_model import FastLanguageModel
from pantheraml.api.loading_options import hub_token
from pantheraml.base import log
from pantheraml.base.errors import ConfigError
from pantheraml.hooks.unsloth_arguments import chosen_targets, kind_for
from pantheraml.models.adapters import target_layers
from pantheraml.models.causal_lm import FastCausalLM
from pantheraml.models.load_finetuned import adapter_base
from pantheraml.models.loader import kind_of
from pantheraml.models.model_kind import VISION, inside, vision_parts
from pantheraml.specs.train import ModelConfig

logger = log.get(__name__)


class FastVisionModel:
    """`from_pretrained` loads a model with its processor, `get_peft_model` adds adapters."""

    @staticmethod
    def from_pretrained(model_name: str, *args: Any, **arguments: Any) -> tuple[PreTrainedModel, Any]:
        """Load a vision-language model and its processor; arguments are those of `FastLanguageModel`.

        Quantization applies to the language layers; the vision tower keeps the compute dtype.
        """
        if arguments.pop("text_only", None):
            raise ConfigError("FastVisionModel loads models with vision.", fix="Use FastLanguageModel for text_only.")
        auto_model = arguments.get("auto_model") or VISION.auto_model
        kind = kind_for(auto_model, {})
        if kind.classifies:
            raise ConfigError("FastVisionModel loads no classifiers.", fix="Load a text model with FastLanguageModel.")
        if kind is not VISION:
            raise ConfigError(
                f"FastVisionModel does not support auto_model={auto_model.__name__}, which is for model code of the "
                "checkpoint: models with vision are loaded by transformers' own classes.",
                fix="Remove auto_model and trust_remote_code.",
            )
        return FastLanguageModel.from_pretrained(model_name, *args, **{**arguments, "auto_model": VISION.auto_model})

    @staticmethod
    def get_peft_model(
        model: PreTrainedModel,
        r: int = 16,
        target_modules: str | list[str] | None = "all-linear",
        *args: Any,
        finetune_vision_layers: bool = True,
        finetune_language_layers: bool = True,
        **arguments: Any,
    ) -> PeftModel:
        """Add adapters; other arguments are those of `FastLanguageModel`.

        `finetune_vision_layers`, `finetune_language_layers`: whether layers of the vision tower and of the decoder get
        adapters. With "all-linear", layers between the two (the projector) get none; name them in `target_modules`.
        """
        if isinstance(model, FastCausalLM):  # else an error says what is wrong with it
            target_modules = _targets(
                model, target_modules, vision=finetune_vision_layers, language=finetune_language_layers
            )
        return FastLanguageModel.get_peft_model(model, r, target_modules, *args, **arguments)

    for_training = staticmethod(FastLanguageModel.for_training)
    for_inference = staticmethod(FastLanguageModel.for_inference)


class FastModel:
    """Unsloth's loader of any kind of model: `FastVisionModel` for vision-language models, else `FastLanguageModel`."""

    @staticmethod
    def from_pretrained(model_name: str, *args: Any, **arguments: Any) -> tuple[PreTrainedModel, Any]:
        """Load a model, with a processor if it is a vision-language model and else with a tokenizer.

        `text_only` or an `auto_model` of text models: load such a model as a text model where transformers can.
        """
        text_only = arguments.get("text_only") or arguments.get("auto_model") not in (None, VISION.auto_model)
        if text_only or not _has_vision(model_name, arguments):
            return FastLanguageModel.from_pretrained(model_name, *args, **arguments)
        logger.info("%s is a vision-language model: loading it with its processor", model_name)
        return FastVisionModel.from_pretrained(model_name, *args, **arguments)

    @staticmethod
    def get_peft_model(model: PreTrainedModel, *args: Any, **arguments: Any) -> PeftModel:
        kind = FastVisionModel if isinstance(model, FastCausalLM) and vision_parts(model) else FastLanguageModel
        return kind.get_peft_model(model, *args, **arguments)

    for_training = staticmethod(FastLanguageModel.for_training)
    for_inference = staticmethod(FastLanguageModel.for_inference)


def _has_vision(model_name: str, arguments: dict[str, Any]) -> bool:
    names = ("revision", "trust_remote_code")
    config = ModelConfig(path=model_name, **{name: arguments[name] for name in names if name in arguments})
    with hub_token(arguments.get("token")):
        adapter = adapter_base(config)
        return kind_of(config if adapter is None else adapter[1]) is VISION


def _targets(model: PreTrainedModel, targets: str | Iterable[str] | None, *, vision: bool, language: bool) -> list[str]:
    """Return the names of the layers to adapt, without the parts that are switched off."""
    parts = vision_parts(model)
    if not parts:
        raise ConfigError(
            f"FastVisionModel.get_peft_model needs a vision-language model, not a {type(model).__name__}.",
            fix="Use FastLanguageModel.get_peft_model.",
        )
    visual, encoder = inside(parts, model), inside([model.get_encoder(modality="image")], model)
    everything = targets is None or targets == "all-linear"
    kept = [
        name
        for name in target_layers(model, chosen_targets(model, targets, attention=True, mlp=True))
        if (vision and (name in encoder or not everything) if name in visual else language)
    ]
    if not kept:
        raise ConfigError(
            f"No layer of {targets!r} is left to train: finetune_vision_layers={vision}, "
            f"finetune_language_layers={language}.",
            fix="Set one of them to True, or choose other target_modules.",
        )
    return kept
