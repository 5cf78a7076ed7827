"""Kinds of models that are loaded: text decoders, and vision-language models, which also take images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
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
