"""Fast models for existing training code: `FastLanguageModel`, and the names that Unsloth scripts import."""

from pantheraml.api.language_model import FastLanguageModel
from pantheraml.api.unsloth_names import FastModel, PatchDPOTrainer, is_bfloat16_supported

__all__ = ["FastLanguageModel", "FastModel", "PatchDPOTrainer", "is_bfloat16_supported"]
