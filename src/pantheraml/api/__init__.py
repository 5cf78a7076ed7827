"""Fast models for existing code: `FastLanguageModel`, `FastVisionModel`, and other names of Unsloth scripts."""

from pantheraml.api.language_model import FastLanguageModel
from pantheraml.api.unsloth_names import PatchDPOTrainer, is_bf16_supported, is_bfloat16_supported
from pantheraml.api.vision_model import FastModel, FastVisionModel

__all__ = [
    "FastLanguageModel",
    "FastModel",
    "FastVisionModel",
    "PatchDPOTrainer",
    "is_bf16_supported",
    "is_bfloat16_supported",
]
