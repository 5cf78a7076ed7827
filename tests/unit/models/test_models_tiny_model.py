"""Configs of published checkpoints, which differ from their families' defaults: each can be shrunk and tested."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from pantheraml.models.document_masks import document_masks
from pantheraml.models.packing_check import check_packing_support
from pantheraml.models.tiny_model import tiny_config

LONG = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.5] * 48}
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
PHI = {
    "hidden_size": 3072, "num_hidden_layers": 32, "sliding_window": 262144, "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096, "rope_scaling": LONG,
}  # fmt: skip
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3.1": ("llama", {"num_key_value_heads": 8, "rope_scaling": {**LLAMA3, "rope_type": "llama3"}}),
    "Qwen 2.5": ("qwen2", {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2}),
    "Qwen 3 MoE": ("qwen3_moe", {"num_experts": 128, "num_experts_per_tok": 8, "num_key_value_heads": 4}),
    "Phi 3.5": ("phi3", {**PHI, "num_attention_heads": 32, "num_key_value_heads": 32}),
    "Phi 4 mini": ("phi3", {**PHI, "num_attention_heads": 24, "num_key_value_heads": 8, "partial_rotary_factor": 0.75}),
    "Gemma 3 4B": ("gemma3", {"text_config": {"num_hidden_layers": 34, "sliding_window": 1024}}),
    "DeepSeek V3": ("deepseek_v3", {"rope_scaling": {**YARN, "factor": 40, "mscale": 1.0, "type": "yarn"}}),
    "GPT-OSS 20B": ("gpt_oss", {"num_local_experts": 32, "rope_scaling": {**YARN, "factor": 32.0, "type": "yarn"}}),
    "Falcon 7B": ("falcon", {"num_attention_heads": 71, "hidden_size": 4544, "multi_query": True}),
    "GPT-2 XL": ("gpt2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "OPT 350M": ("opt", {"hidden_size": 1024, "word_embed_proj_dim": 512, "do_layer_norm_before": False}),
    "Granite 4 micro": ("granitemoehybrid", {"num_hidden_layers": 40, "layer_types": ["attention"] * 40}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_support_packing(name: str) -> None:
    family, values = PUBLISHED[name]
    verdict = check_packing_support(AutoConfig.for_model(family, **copy.deepcopy(values)), longest=2048)
    assert verdict.modes, verdict


def test_tiny_models_are_small_with_every_layer_type() -> None:
    kinds = ["linear_attention"] * 11 + ["full_attention"] + ["linear_attention"] * 12
    small = tiny_config(AutoConfig.for_model("qwen3_next", num_hidden_layers=24, layer_types=kinds))
    assert small.layer_types == kinds[:12]
    assert small.num_hidden_layers == 12
    assert small.hidden_size == 64


def test_masks_restart_windows_and_chunks_at_each_document() -> None:
    config = AutoConfig.for_model("llama4_text", attention_chunk_size=2, num_hidden_layers=4)
    config._attn_implementation = "sdpa"
    masks = document_masks(config, torch.tensor([[0, 1, 2, 0, 1, 2]]), torch.float32)
    assert isinstance(masks, dict)
    assert masks["chunked_attention"][0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    assert masks["full_attention"][0, 0, 2].int().tolist() == [1, 1, 1, 0, 0, 0]
    config._attn_implementation = "eager"
    added = document_masks(config, torch.tensor([[0, 0]]), torch.bfloat16)
    assert isinstance(added, dict)
    lowest = torch.finfo(torch.bfloat16).min
    assert added["full_attention"][0, 0].tolist() == [[0.0, lowest], [lowest, 0.0]]
