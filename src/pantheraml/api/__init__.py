"""Fast models for existing code: `FastLanguageModel`, `FastVisionModel`, and other names of Unsloth scripts."""

from pantheraml.api.language_model import FastLanguageModel
from pantheraml.api.unsloth_names import (
    PatchDPOTrainer,
    PatchFastRL,
    PatchKTOTrainer,
    is_bf16_supported,
    is_bfloat16_supported,
)
from pantheraml.api.vision_model import FastModel, FastVisionModel
from pantheraml.hooks import trl

__all__ = [
    "FastLanguageModel",
    "FastModel",
    "FastVisionModel",
    "PatchDPOTrainer",
    "PatchFastRL",
    "PatchKTOTrainer",
    "is_bf16_supported",
    "is_bfloat16_supported",
]

# Not when a model is loaded: most scripts import TRL, and make its configs, before that.
trl.apply_on_import()
