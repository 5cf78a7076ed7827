"""Configs of tiny models of the families with fused layers, such that every difference between families matters."""

from __future__ import annotations

from typing import Any

from tests.unit.models.conftest import COMMON
from tests.unit.models.conftest import FAMILIES as COMMON_FAMILIES

FAMILIES: dict[str, dict[str, Any]] = {
    **COMMON_FAMILIES,
    "gemma3_text": {
        **COMMON, "head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 11,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
        },
    },
    "granite": {**COMMON_FAMILIES["granite"], "residual_multiplier": 0.6, "attention_multiplier": 0.3,
                "embedding_multiplier": 1.5},
    "smollm3": {**COMMON, "no_rope_layers": [1, 0]},
    "olmo2": COMMON,
    "olmo3": {
        **COMMON, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
        },
    },
    "exaone4": {
        **COMMON, "head_dim": 8, "sliding_window": 4, "sliding_window_pattern": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "cwm": {**COMMON, "head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "cohere2": {**COMMON, "sliding_window": 4},
    "ministral3": {
        **COMMON, "head_dim": 8, "rope_parameters": {
            "rope_type": "default", "rope_theta": 100.0, "llama_4_scaling_beta": 0.4,
            "original_max_position_embeddings": 4,
        },
    },
    "ministral": {**COMMON, "head_dim": 8, "sliding_window": 4,
                  "layer_types": ["sliding_attention", "full_attention"]},
}  # fmt: skip

FUSED = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "phi3",
    "gemma3_text",
    "granite",
    "smollm3",
    "ministral",
    "ministral3",
    "olmo2",
    "olmo3",
    "exaone4",
    "cwm",
]
CHAINED = [family for family in FUSED if family not in ("gemma3_text", "olmo3")]
"""Families whose layers all get the same arguments. The others have a RoPE table with a window, and one without."""
