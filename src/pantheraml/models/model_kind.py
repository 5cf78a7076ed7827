"""Kinds of models that are loaded: text decoders, vision-language models, which also take images, and classifiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)

Attention = str | dict[str, str]
"""Attention implementation of a model, or of its parts by the names of their configs ("" is the whole)."""


@dataclass(frozen=True)
class ModelKind:
    """How transformers builds the models of a kind."""

    noun: str
    auto_model: Any
    mapping: Any
    """Config class -> model class."""
    otherwise: str
    """What to do with a model of another kind."""
    classifies: bool = False
    """Whether it scores whole rows, and generates nothing."""
    labels: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a classifier's labels, in place of those of its config."""

    def labelled(self, labels: Mapping[str, Any]) -> ModelKind:
        return replace(self, labels=labels)


TEXT = ModelKind(
    "causal language model",
    AutoModelForCausalLM,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    "Use a model that generates text (its class in config.json ends in ForCausalLM).",
)
VISION = ModelKind(
    "vision-language model",
    AutoModelForImageTextToText,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    "Load text models with FastLanguageModel.",
)
CLASSIFIER = ModelKind(
    "text classifier",
    AutoModelForSequenceClassification,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    "Use a model that takes text only, and for which transformers has a class ...ForSequenceClassification.",
    classifies=True,
)


def is_classifier(model: Any) -> bool:
    return type(model).__name__.endswith(_CLASSIFIES)


def is_classifier_config(source: Any) -> bool:
    """Return whether a transformers config is that of a classifier's checkpoint."""
    names = getattr(source, "architectures", None) or ()
    return bool(names) and all(name.endswith(_CLASSIFIES) for name in names)


_CLASSIFIES = "ForSequenceClassification"


def classifier_head(model: Any) -> list[nn.Module]:
    """Return the modules of a classifier beside its body; nothing for other models."""
    if not is_classifier(model):
        return []
    return [child for name, child in model.named_children() if name != model.base_model_prefix]


def is_vision_config(source: Any) -> bool:
    """Return whether a transformers config describes a vision-language model."""
    return type(source) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def vision_parts(model: Any) -> list[nn.Module]:
    """Return the modules that see images: the vision encoder, and what maps its output to the decoder's input.

    That is everything but the decoder and the output head; nothing for a model that takes text only.
    """
    if not is_vision_config(model.config):
        return []
    decoder = model.get_decoder()
    return [child for child in model.base_model.children() if all(module is not decoder for module in child.modules())]


def inside(parts: list[nn.Module], model: nn.Module) -> set[str]:
    """Return the names of all modules in `parts` of `model`."""
    members = {id(module) for part in parts for module in part.modules()}
    return {name for name, module in model.named_modules() if id(module) in members}
