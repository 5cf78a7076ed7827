"""Sizes of common models by their hub names, for planning where the hub cannot be reached.

Each is what the model's own `config.json` says. A name is looked up without its owner, and without the suffix of a
tuned variant, which has the same sizes.
"""

from __future__ import annotations

import difflib
import re
from typing import Any

_KEYS = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings"),
)

# fmt: off
_TABLE: dict[str, tuple[Any, ...]] = {
    "llama-3.2-1b":   ("llama", 128_256, 2048, 8192, 16, 32, 8, 64, True),
    "llama-3.2-3b":   ("llama", 128_256, 3072, 8192, 28, 24, 8, 128, True),
    "llama-3-8b":     ("llama", 128_256, 4096, 14_336, 32, 32, 8, 128, False),
    "llama-3-70b":    ("llama", 128_256, 8192, 28_672, 80, 64, 8, 128, False),
    "llama-3.1-8b":   ("llama", 128_256, 4096, 14_336, 32, 32, 8, 128, False),
    "llama-3.1-70b":  ("llama", 128_256, 8192, 28_672, 80, 64, 8, 128, False),
    "llama-3.3-70b":  ("llama", 128_256, 8192, 28_672, 80, 64, 8, 128, False),
    "llama-3.1-405b": ("llama", 128_256, 16_384, 53_248, 126, 128, 8, 128, False),
    "llama-2-7b":     ("llama", 32_000, 4096, 11_008, 32, 32, 32, 128, False),
    "llama-2-13b":    ("llama", 32_000, 5120, 13_824, 40, 40, 40, 128, False),
    "llama-2-70b":    ("llama", 32_000, 8192, 28_672, 80, 64, 8, 128, False),
    "tinyllama-1.1b": ("llama", 32_000, 2048, 5632, 22, 32, 4, 64, False),
    "smollm2-135m":   ("llama", 49_152, 576, 1536, 30, 9, 3, 64, True),
    "smollm2-360m":   ("llama", 49_152, 960, 2560, 32, 15, 5, 64, True),
    "smollm2-1.7b":   ("llama", 49_152, 2048, 8192, 24, 32, 32, 64, True),
    "mistral-7b-v0.1": ("mistral", 32_000, 4096, 14_336, 32, 32, 8, 128, False),
    "mistral-7b-v0.2": ("mistral", 32_000, 4096, 14_336, 32, 32, 8, 128, False),
    "mistral-7b":     ("mistral", 32_768, 4096, 14_336, 32, 32, 8, 128, False),
    "qwen2.5-0.5b":   ("qwen2", 151_936, 896, 4864, 24, 14, 2, 64, True),
    "qwen2.5-1.5b":   ("qwen2", 151_936, 1536, 8960, 28, 12, 2, 128, True),
    "qwen2.5-3b":     ("qwen2", 151_936, 2048, 11_008, 36, 16, 2, 128, True),
    "qwen2.5-7b":     ("qwen2", 152_064, 3584, 18_944, 28, 28, 4, 128, False),
    "qwen2.5-14b":    ("qwen2", 152_064, 5120, 13_824, 48, 40, 8, 128, False),
    "qwen2.5-32b":    ("qwen2", 152_064, 5120, 27_648, 64, 40, 8, 128, False),
    "qwen2.5-72b":    ("qwen2", 152_064, 8192, 29_568, 80, 64, 8, 128, False),
    "qwen3-0.6b":     ("qwen3", 151_936, 1024, 3072, 28, 16, 8, 128, True),
    "qwen3-1.7b":     ("qwen3", 151_936, 2048, 6144, 28, 16, 8, 128, True),
    "qwen3-4b":       ("qwen3", 151_936, 2560, 9728, 36, 32, 8, 128, True),
    "qwen3-8b":       ("qwen3", 151_936, 4096, 12_288, 36, 32, 8, 128, False),
    "qwen3-14b":      ("qwen3", 151_936, 5120, 17_408, 40, 40, 8, 128, False),
    "qwen3-32b":      ("qwen3", 151_936, 5120, 25_600, 64, 64, 8, 128, False),
    "mistral-nemo":   ("mistral", 131_072, 5120, 14_336, 40, 32, 8, 128, False),
    "mistral-small-24b": ("mistral", 131_072, 5120, 32_768, 40, 32, 8, 128, False),
    "ministral-8b":   ("mistral", 131_072, 4096, 12_288, 36, 32, 8, 128, False),
    "gemma-2b":       ("gemma", 256_000, 2048, 16_384, 18, 8, 1, 256, True),
    "gemma-7b":       ("gemma", 256_000, 3072, 24_576, 28, 16, 16, 256, True),
    "gemma-2-2b":     ("gemma2", 256_000, 2304, 9216, 26, 8, 4, 256, True),
    "gemma-2-9b":     ("gemma2", 256_000, 3584, 14_336, 42, 16, 8, 256, True),
    "gemma-2-27b":    ("gemma2", 256_000, 4608, 36_864, 46, 32, 16, 128, True),
    "gemma-3-270m":   ("gemma3_text", 262_144, 640, 2048, 18, 4, 1, 256, True),
    "gemma-3-1b":     ("gemma3_text", 262_144, 1152, 6912, 26, 4, 1, 256, True),
    "smollm3-3b":     ("smollm3", 128_256, 2048, 11_008, 36, 16, 4, 128, True),
    "phi-3-mini-4k":  ("phi3", 32_064, 3072, 8192, 32, 32, 32, 96, False),
    "phi-3-medium-4k": ("phi3", 32_064, 5120, 17_920, 40, 40, 10, 128, False),
    "phi-4":          ("phi3", 100_352, 5120, 17_920, 40, 40, 10, 128, False),
    "phi-4-mini":     ("phi3", 200_064, 3072, 8192, 32, 24, 8, 128, True),
    "granite-3.3-2b": ("granite", 49_159, 2048, 8192, 40, 32, 8, 64, True),
    "granite-3.3-8b": ("granite", 49_159, 4096, 12_800, 40, 32, 8, 128, True),
    "deepseek-r1-distill-qwen-1.5b": ("qwen2", 151_936, 1536, 8960, 28, 12, 2, 128, False),
}
# fmt: on

_WINDOWS = {"mistral-7b-v0.1": 4096, "gemma-3-270m": 512, "gemma-3-1b": 512}
"""`sliding_window` of models of the table."""

_SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "image_size": 896,
    "patch_size": 14,
}
"""The vision tower of Gemma 3."""
# fmt: off
_VISION: dict[str, tuple[Any, ...]] = {
    "gemma-3-4b":  ("gemma3_text", 262_208, 2560, 10_240, 34, 8, 4, 256, True),
    "gemma-3-12b": ("gemma3_text", 262_208, 3840, 15_360, 48, 16, 8, 256, True),
    "gemma-3-27b": ("gemma3_text", 262_208, 5376, 21_504, 62, 32, 16, 128, True),
}
"""Text models beside that tower."""
_EXPERTS: dict[str, tuple[Any, ...]] = {
    "qwen3-30b-a3b":   (768, 128, "qwen3_moe", 151_936, 2048, 6144, 48, 32, 4, 128, False),
    "qwen3-235b-a22b": (1536, 128, "qwen3_moe", 151_936, 4096, 12_288, 94, 64, 4, 128, False),
    "mixtral-8x7b":    (None, 8, "mixtral", 32_000, 4096, 14_336, 32, 32, 8, 128, False),
    "gpt-oss-20b":     (None, 32, "gpt_oss", 201_088, 2880, 2880, 24, 64, 8, 64, False),
    "gpt-oss-120b":    (None, 128, "gpt_oss", 201_088, 2880, 2880, 36, 64, 8, 64, False),
}
"""With the width of an expert, where it is not `intermediate_size`, and their number."""
# fmt: on

_SAME_SIZES = {
    **{f"qwen2-{size}": f"qwen2.5-{size}" for size in ("0.5b", "1.5b", "7b", "72b")},
    **{f"qwen2.5-coder-{size}": f"qwen2.5-{size}" for size in ("0.5b", "1.5b", "3b", "7b", "14b", "32b")},
    **{f"deepseek-r1-distill-qwen-{size}": f"qwen2.5-{size}" for size in ("7b", "14b", "32b")},
    "deepseek-r1-distill-llama-8b": "llama-3.1-8b",
    "deepseek-r1-distill-llama-70b": "llama-3.3-70b",
    "phi-3-mini-128k": "phi-3-mini-4k",
    "phi-3.5-mini": "phi-3-mini-4k",
    "phi-3-medium-128k": "phi-3-medium-4k",
}
"""Name -> a name of the table."""

_TUNED = re.compile(r"-(instruct|thinking|chat|hf|base|it|pt)(?=-|$)")
_VERSION = re.compile(r"-(v\d+(\.\d+)?|\d{4})$")


def known_config(name: str) -> dict[str, Any] | None:
    """Settings of the `config.json` of the model that people call `name`; None: it is not in the table."""
    key = _key(name)
    names = (_SAME_SIZES.get(each, each) for each in (key, _VERSION.sub("", key)))
    return next(filter(None, map(_config, names)), None)


def _config(name: str) -> dict[str, Any] | None:
    if name in _TABLE:
        window = {"sliding_window": _WINDOWS[name]} if name in _WINDOWS else {}
        return dict(zip(_KEYS, _TABLE[name], strict=True)) | window
    if name in _VISION:
        text = dict(zip(_KEYS, _VISION[name], strict=True))
        return {"model_type": "gemma3", "text_config": text, "vision_config": dict(_SIGLIP)}
    if name in _EXPERTS:
        width, count, *sizes = _EXPERTS[name]
        experts = {"num_local_experts": count} | ({} if width is None else {"moe_intermediate_size": width})
        return dict(zip(_KEYS, sizes, strict=True)) | experts
    return None


def nearest_name(name: str) -> str | None:
    """Return the known name that is most like `name`; None: none is like it."""
    near = difflib.get_close_matches(_key(name), known_names(), n=1, cutoff=0.5)
    return near[0] if near else None


def known_names() -> tuple[str, ...]:
    return (*_TABLE, *_VISION, *_EXPERTS, *_SAME_SIZES)


def _key(name: str) -> str:
    return _TUNED.sub("", name.lower().rpartition("/")[2].removeprefix("meta-"))
